"""Text of documents: PDF, Word, slides, sheets, web pages, mail, books and code."""
