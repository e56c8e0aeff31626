"""Parts that Word, PowerPoint and Excel files share: packages, drawings and equations."""
