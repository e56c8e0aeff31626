"""Documents put as the bytes of a file: converted by the kind of file, with progress, read back by chunks."""

from __future__ import annotations

import json
import threading
from typing import Any

import files
import pytest
from omitting import leave_out

WAIT_S = 60.0
HTML = (
    b"<html><head><title>Teams</title></head><body><h1>Billing</h1><p>Mara leads billing in Bergen.</p></body></html>"
)


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"} if key else {}


def put(server: Any, name: str, data: bytes, media: str = "application/octet-stream", key: str = "") -> Any:
    headers = {"Content-Type": media, **bearer(key)}
    return server.client.put(f"/v1/documents/{name}", content=data, headers=headers)


def test_files_are_converted_by_name_or_media_type(server: Any) -> None:
    assert put(server, "teams.html", HTML).status_code == 201
    assert put(server, "teams", HTML, "text/html; charset=utf-8").json()["title"] == "Teams"
    assert put(server, "report.pdf", files.pdf(["Mara leads billing", "Jonas keeps a parrot"])).status_code == 201
    [hit] = server.client.post("/v1/search", json={"query": "parrot"}).json()["data"]
    assert hit["document"] == "report.pdf"
    [chunk] = server.ask(search={"query": "parrot"}).json()["blend"]["chunks"]
    read = server.client.get("/v1/documents/report.pdf").json()
    places = {c["id"]: c["place"] for c in read["chunks"]}
    assert "page" in chunk["place"]
    assert places[chunk["id"]] == chunk["place"]
    assert "parrot" in "".join(c["text"] for c in read["chunks"])
    html = server.client.get("/v1/documents/teams.html").json()
    assert "<p>" not in html["chunks"][0]["text"]


def test_office_files_are_accepted_with_and_without_a_media_type(server: Any) -> None:
    office = "application/vnd.openxmlformats-officedocument"
    for name, data, media in (
        ("prices.xlsx", files.xlsx(), f"{office}.spreadsheetml.sheet"),
        ("plan.pptx", files.pptx(), f"{office}.presentationml.presentation"),
        ("letter.docx", files.docx(), f"{office}.wordprocessingml.document"),
        ("letter.rtf", rb"{\rtf1 Mara leads billing}", "application/rtf"),
    ):
        named = name.replace(".", "-")
        assert [put(server, name, data, kind).status_code for kind in (media, "application/x-made-up")] == [201, 200]
        assert put(server, named, data, media).status_code == 201
        url = f"/v1/documents/{name}"
        request = server.client.build_request("PUT", url, content=data)
        assert "content-type" not in request.headers
        assert server.client.send(request).status_code == 200
        read = [server.client.get(f"/v1/documents/{one}").json()["chunks"] for one in (name, named)]
        assert [c["text"] for c in read[0]] == [c["text"] for c in read[1]]
        assert "PK" not in read[0][0]["text"]


def test_files_that_are_refused(start: Any) -> None:
    server = start(max_body=20_000)
    for name, data, media, status, code in (
        ("tool.exe", b"MZ", "application/octet-stream", 415, "unsupported_document"),
        ("picture", b"\x89PNG", "image/png", 415, None),
        ("picture.png", b"\x89PNG", "image/png", 415, "unsupported_document"),
        ("notes.txt", b"--x", "multipart/form-data; boundary=x", 415, None),
        ("notes.txt", b"a", "application/x-www-form-urlencoded", 415, None),
        ("notes.txt", b"a\0b", "application/octet-stream", 400, "unreadable_document"),
        ("empty.txt", b" \n", "application/octet-stream", 400, "unreadable_document"),
        ("broken.pdf", b"%PDF-1.7 nothing", "application/octet-stream", 400, "unreadable_document"),
        ("large.txt", b"a " * 20_000, "application/octet-stream", 413, "body_too_large"),
    ):
        refused = put(server, name, data, media)
        assert (refused.status_code, refused.json()["error"]["code"]) == (status, code), refused.text
    listing = server.client.get("/v1/documents").json()
    assert (listing["data"], listing["max_bytes"]) == ([], 20_000)
    assert {".txt", ".md", ".html"} <= set(listing["suffixes"])
    assert ".exe" not in listing["suffixes"]


def test_progress_is_streamed(server: Any) -> None:
    text = " ".join(f"On day {i} Mara counted the parrots of Bergen near the harbor." for i in range(12))
    headers = {"Accept": "text/event-stream", "Content-Type": "application/octet-stream"}
    reply = server.client.put("/v1/documents/diary.txt", content=text.encode(), headers=headers)
    lines = [line.removeprefix("data: ") for line in reply.text.split("\n\n") if line]
    assert lines.pop() == "[DONE]"
    *progress, last = map(json.loads, lines)
    stored = [record["stored"] for record in progress]
    assert stored == sorted(stored)
    assert (stored[0], stored[-1]) == (0, progress[0]["chunks"])
    assert len(set(stored)) > 2
    assert (last["object"], len(last["chunks"])) == ("document", progress[0]["chunks"])
    assert [d["id"] for d in server.client.get("/v1/documents").json()["data"]] == ["diary.txt"]


def test_a_client_that_leaves_stores_nothing(server: Any) -> None:
    go, began = threading.Event(), threading.Event()

    def hold() -> None:
        began.set()
        go.wait(WAIT_S)

    server.state.engine.service.between_steps(hold)
    assert began.wait(WAIT_S)
    headers = {"Accept": "text/event-stream", "Content-Type": "text/plain"}
    with server.client.stream("PUT", "/v1/documents/diary", content=b"Mara counts parrots", headers=headers) as reply:
        next(reply.iter_bytes())
    while server.state.active:
        pass
    go.set()
    server.state.engine.service.between_steps(lambda: None).result(WAIT_S)  # behind the launch and its undoing
    assert server.client.get("/v1/documents").json()["data"] == []
    with server.state.store.read() as reader:
        assert reader.entries("chunks") <= 1  # the prompt's prefix


def test_a_tenant_reads_its_own_documents_alone(start: Any) -> None:
    server = start(("plain-key-0000", "ada:ada-key-000000"))
    assert put(server, "own.txt", b"Mara leads billing", key="ada-key-000000").status_code == 201
    for key, status in (("ada-key-000000", 200), ("plain-key-0000", 404), ("", 401)):
        assert server.client.get("/v1/documents/own.txt", headers=bearer(key)).status_code == status


def test_what_is_left_out_of_a_document(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    leave_out(monkeypatch, {"deck.pptx": ["2 charts (slide 3)"]})
    assert put(server, "deck.pptx", b"Mara leads billing").json()["omissions"] == ["2 charts (slide 3)"]
    headers = {"Accept": "text/event-stream", "Content-Type": "application/octet-stream"}
    reply = server.client.put("/v1/documents/deck.pptx", content=b"Mara leads billing", headers=headers)
    assert json.loads(reply.text.split("\n\n")[-3].removeprefix("data: "))["omissions"] == ["2 charts (slide 3)"]
    assert put(server, "plan.docx", b"Jonas keeps a parrot").json()["omissions"] == []
    assert server.client.put("/v1/documents/note", json={"text": "Ada is in Oslo"}).json()["omissions"] == []
    listed = {d["id"]: d["omissions"] for d in server.client.get("/v1/documents").json()["data"]}
    assert listed == {"deck.pptx": ["2 charts (slide 3)"], "plan.docx": [], "note": []}
    assert server.client.get("/v1/documents/deck.pptx").json()["omissions"] == ["2 charts (slide 3)"]
    leave_out(monkeypatch, {})  # the same text, read in full
    assert put(server, "deck.pptx", b"Mara leads billing").json()["omissions"] == []
    assert server.client.get("/v1/documents/deck.pptx").json()["omissions"] == []
