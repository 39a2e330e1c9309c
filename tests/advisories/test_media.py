"""Images, audio and video, which our engine does not accept: nothing decodes them, and no path is opened."""

import base64
from pathlib import Path

import pytest

from advisories.target import CHAT, Target, chat
from advisories.tries import tries

DECODERS = (
    "CVE-2025-46722",  # vLLM
    "CVE-2025-62372",
    "CVE-2026-12491",
    "CVE-2026-22773",
    "CVE-2026-22778",
    "CVE-2026-34755",
    "CVE-2026-34760",
    "CVE-2026-54236",
    "CVE-2026-5497",
    "CVE-2026-57173",
    "CVE-2026-105753",
    "CVE-2026-105754",
    "GHSA-jcq2-4gch-5qhf",
    "GHSA-p92p-rxj5-7p2x",
    "CVE-2025-15514",  # Ollama
)
KWARGS = (
    "CVE-2026-69147",
    "CVE-2026-105758",
    "CVE-2026-105760",
    "GHSA-h3rc-6mm3-gc2m",
    "GHSA-j682-9xp5-rrf3",
    "GHSA-823j-m4cj-hmjf",
)
NO_IMAGE = base64.b64encode(b"no image at all").decode()
FRAMES = ",".join(["/9j/4AAQSkZJRg=="] * 2000)
PARTS = [
    {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{NO_IMAGE}"}, "uuid": "../../a"},
    {"type": "image_url", "image_url": None, "uuid": "never-seen"},
    {"type": "video_url", "video_url": {"url": f"data:video/jpeg;base64,{FRAMES}"}},
    {"type": "input_audio", "input_audio": {"data": NO_IMAGE, "format": "opus"}},
    {"type": "image_embeds", "image_embeds": NO_IMAGE},
    {"type": "audio_embeds", "audio_embeds": NO_IMAGE},
    {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": NO_IMAGE}},
]


@tries(*DECODERS)
def test_media_parts_are_refused_by_name(server: Target):
    for part in PARTS:
        for content in ([part], [{"type": "text", "text": "a"}, part]):
            place = f"messages[0].content[{len(content) - 1}].type"
            answer = server.refuses(CHAT, chat(content=content), place)
            assert NO_IMAGE not in answer.text
            server.refuses("/tokenize", {"messages": chat(content=content)["messages"]}, place)


@tries(*KWARGS)
def test_options_for_reading_media_are_refused_or_ignored(server: Target):
    server.refuses_or_ignores(
        media_io_kwargs={"video": {"video_backend": "pynvvideocodec", "fps": 10**9, "max_frames": 10**9}}
    )
    server.refuses_or_ignores(mm_processor_kwargs={"code_revision": "evil", "trust_remote_code": True})
    server.refuses_or_ignores(images=[NO_IMAGE], multi_modal_data={"image": NO_IMAGE})


@tries(
    "CVE-2026-54233",
    "CVE-2026-55646",
    "CVE-2026-57173",
    "GHSA-99f2-hwrc-gvq8",
    "GHSA-m52c-39rh-f3gp",
    "CVE-2024-4888",
)
@pytest.mark.parametrize("route", ["transcriptions", "translations", "speech"])
def test_recordings_are_refused_for_models_of_our_engine(server: Target, route):
    form = (
        b'--a\r\nContent-Disposition: form-data; name="file"; filename="/etc/passwd"\r\n\r\n'
        + bytes(1_000_000)
        + b"\r\n--a--\r\n"
    )
    headers = {"Content-Type": "multipart/form-data; boundary=a"}
    server.refuses(f"/v1/audio/{route}", form, "model", headers=headers)
    server.refuses(f"/audio/{route}", {"file": "/etc/passwd"}, "model")
    assert Path("/etc/passwd").exists()
