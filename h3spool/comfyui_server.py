"""One ComfyUI server over HTTP: each answer checked, each failure one of our errors.

ComfyUI has no authentication, so only a loopback URL is taken unless the owner says otherwise. Tried with 0.33.0.
"""

from __future__ import annotations

import json
from ipaddress import ip_address
from pathlib import PurePath
from urllib.parse import urlsplit

from h3spool.errors import NotPermitted, NotUsable, TryLater, Unavailable

MAX_ANSWER_BYTES = 256 << 20
TEMP = "temp"  # ComfyUI's folder that it empties at every start; also the only one that is written to


class Away(TryLater):
    """The server is not there just now: down, hung, or restarting."""


class Server:
    """A connection to one ComfyUI.

    Args:
        url: such as http://127.0.0.1:8192.
        allow_remote: accept a URL that is not on this machine's loopback.
        timeout_s: how long a single answer may take.

    Attributes:
        url: without a password.

    Raises:
        NotPermitted: the URL is not loopback.
        NotUsable: it is no URL.
        Unavailable: httpx is not installed.
    """

    def __init__(self, url: str, *, allow_remote: bool = False, timeout_s: float = 30.0):
        try:
            import httpx
        except ImportError:
            raise Unavailable("the ComfyUI engine needs httpx: pip install 'h3spool[comfyui]'") from None
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise NotUsable(f"{url}: not a URL like http://127.0.0.1:8192")
        if not allow_remote and not _is_loopback(parts.hostname):
            port = parts.port or 8188
            raise NotPermitted(
                f"{url}: not on this machine, and ComfyUI has no authentication. Leave it on 127.0.0.1 there, run "
                f"`ssh -N -L {port}:127.0.0.1:{port} {parts.hostname}` here and use http://127.0.0.1:{port}; or accept "
                "the risk with --allow-remote"
            )
        self.url = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}".rstrip("/")
        # A proxy from the environment must not see a loopback server.
        self._client = httpx.Client(base_url=url, timeout=timeout_s, trust_env=False)

    def json(self, method: str, path: str, body: object = None) -> dict:
        """The JSON object that it answers ({} where it answers nothing).

        Raises:
            Away: unreachable, hung, restarting.
            NotPermitted: 401 or 403.
            NotUsable: any other refusal, or no JSON object.
        """
        status, answer = self._request(method, path, **({} if body is None else {"json": body}))
        return self._decoded(status, answer, path)

    def submit(self, graph: dict[str, dict], prompt_id: str) -> bool:
        """Queue a graph in API format under an id; False where a file that it loads is not there.

        Raises:
            Away, NotPermitted
            NotUsable: it refuses the graph, or a part of it.
        """
        body = {"prompt": graph, "prompt_id": prompt_id, "client_id": prompt_id}
        status, answer = self._request("POST", "/prompt", json=body)
        said = self._decoded(200 if status == 400 else status, answer, "/prompt")
        nodes = said.get("node_errors") or {}
        if status == 200 and not nodes:
            return True
        kinds = {error.get("type") for node in nodes.values() for error in node.get("errors", [])}
        if kinds == {"custom_validation_failed"}:
            return False
        if status == 200:  # a part of the graph was dropped, the rest is queued
            self.json("POST", "/queue", {"delete": [prompt_id]})
        raise NotUsable(f"{self.url} cannot run the decode: {_refusal(said)}")

    def locate(self, prompt_id: str) -> dict | str | None:
        """Where a prompt is: its history entry, "running", "pending, ...", or nowhere.

        The queue is read first: what leaves it between the two questions is in the history already.
        """
        queue = self.json("GET", "/queue")
        running, pending = queue.get("queue_running", []), queue.get("queue_pending", [])
        if any(item[1] == prompt_id for item in running):
            return "running"
        if any(item[1] == prompt_id for item in pending):
            return f"pending, {len(running) + len(pending) - 1} others in the queue"
        return self.json("GET", f"/history/{prompt_id}").get(prompt_id)

    def upload(self, name: str, data: bytes, subfolder: str, *, overwrite: bool = False) -> dict:
        """Put a file into ComfyUI's temp folder; the answer has the `name` it was given.

        Raises:
            Away, NotPermitted
            NotUsable: also for 413, larger than the server takes.
        """
        form = {"type": TEMP, "subfolder": subfolder} | ({"overwrite": "true"} if overwrite else {})
        files = {"image": (name, data, "application/octet-stream")}  # any kind of file goes through this field
        status, answer = self._request("POST", "/upload/image", data=form, files=files)
        if status == 413:
            need = len(data) // 1_000_000 + 2
            raise NotUsable(f"{self.url} takes no upload of {len(data)} bytes: start it with --max-upload-size {need}")
        return self._decoded(status, answer, "/upload/image")

    def view(self, file: dict) -> bytes | None:
        """The bytes of a result, or None where it is gone or empty."""
        query = {key: str(file.get(key, "")) for key in ("filename", "subfolder", "type")}
        status, answer = self._request("GET", "/view", params=query)
        if status not in (200, 404):
            self._decoded(status, answer, "/view")
        return answer if status == 200 and answer else None

    def node(self, name: str) -> dict | None:
        """What the server says of a node class, None where it has none."""
        return self.json("GET", f"/object_info/{name}").get(name)

    def vae_names(self) -> list[str]:
        """The files that VAELoader offers."""
        try:
            choice = self.node("VAELoader")["input"]["required"]["vae_name"]
            names = choice[0] if isinstance(choice[0], list) else choice[1]["options"]
        except (KeyError, IndexError, TypeError):
            return []
        return [str(name) for name in names]

    def _request(self, method: str, path: str, **content: object) -> tuple[int, bytes]:
        import httpx

        try:
            with self._client.stream(method, path, **content) as answer:
                body = bytearray()
                for piece in answer.iter_bytes():
                    body += piece
                    if len(body) > MAX_ANSWER_BYTES:
                        raise NotUsable(f"{self.url}{path}: an answer of more than {MAX_ANSWER_BYTES} bytes")
                return answer.status_code, bytes(body)
        except httpx.ConnectError as error:
            raise Away(f"nothing answers at {self.url} ({error}); start ComfyUI there and try again") from error
        except httpx.TimeoutException as error:
            raise Away(f"{self.url}{path}: no answer in time; ComfyUI hangs or is overloaded") from error
        except httpx.HTTPError as error:
            raise Away(f"{self.url}{path}: the connection broke ({error}); is ComfyUI restarting?") from error

    def _decoded(self, status: int, answer: bytes, path: str) -> dict:
        said = answer[:300].decode(errors="replace").strip()
        if status in (401, 403):
            raise NotPermitted(
                f"{self.url}{path}: refused with {status}: a proxy in front of ComfyUI wants a login? {said}"
            )
        if status >= 500:
            raise Away(f"{self.url}{path}: the server failed with {status}: {said}")
        if status != 200:
            raise NotUsable(f"{self.url}{path}: answered {status}, which ComfyUI does not; is this its address? {said}")
        try:
            decoded = json.loads(answer) if answer.strip() else {}
        except (ValueError, RecursionError):
            decoded = None
        if not isinstance(decoded, dict):
            raise NotUsable(f"{self.url}{path}: not a JSON object, so not a ComfyUI: {said}")
        return decoded


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def choose_vae(names: list[str], stream: str, url: str, wanted: str | None = None) -> str | None:
    """The server's VAE file for "video" or "audio": the wanted one, else one of MiniMax H3, fp16 or fp32 first.

    Raises:
        NotUsable: the wanted one is not there.
    """
    if wanted is not None:
        name = wanted if wanted in names else PurePath(wanted).name
        if name not in names:
            raise NotUsable(f"{url} has no {name} in models/vae; it offers {', '.join(names) or 'nothing'}")
        return name
    fitting = [name for name in names if f"minimax_h3_{stream}_vae" in name.lower()]
    return min(fitting, key=lambda name: ("int8" in name, name), default=None)


def _refusal(answer: dict) -> str:
    """What POST /prompt says against a graph, in a sentence."""
    said = [str((answer.get("error") or {}).get("message", ""))]
    for node in (answer.get("node_errors") or {}).values():
        for error in node.get("errors", []):
            said.append(f"{node.get('class_type')}: {error.get('message')}: {str(error.get('details'))[:300]}")
            if error.get("type") == "value_not_in_list":
                said.append("the file is missing in the server's models/vae")
    return "; ".join(filter(None, said)) or "no reason given"
