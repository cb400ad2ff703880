"""A stand-in for a ComfyUI 0.33 server: recorded answers (fixtures/comfyui-0.33.json) and the traps of the real one.

`with Replay() as server` serves on a free port of 127.0.0.1. A prompt runs for `steps` looks at the queue, then its
history appears. What is special is set on the attributes.
"""

import copy
import email
import json
import struct
import subprocess
import threading
import zlib
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import imageio_ffmpeg
import numpy as np

from h3spool import container, latent

FFMPEG = imageio_ffmpeg.get_ffmpeg_exe()
RECORDED = json.loads((Path(__file__).parent / "fixtures" / "comfyui-0.33.json").read_text())
NO_MEMORY = {"exception_type": "torch.OutOfMemoryError", "exception_message": "CUDA out of memory. Tried to allocate"}


def frames_of(video, vae="fp16"):
    """The picture that this server makes of a video latent [1, 24, T, H, W]: uint8 [F, 16H, 16W, 3]."""
    _, _, tokens, rows, columns = video.shape
    size = (latent.frame_count(tokens), 16 * rows, 16 * columns, 3)
    return np.random.default_rng(abs(int(video.sum() * 1e3)) + len(vae)).integers(1, 255, size, np.uint8)


def sound_of(audio):
    """The sound that it makes of an audio latent [1, 32, 2, Ta]: float32 [2, 800 Ta], in steps of 16 bit."""
    noise = np.random.default_rng(abs(int(audio.sum() * 1e3))).integers(-32768, 32767, (2, 800 * audio.shape[3]))
    return (noise / 32768).astype(np.float32)


def png(frame):
    def chunk(kind, data):
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    rows = b"".join(b"\0" + row.tobytes() for row in frame)
    head = struct.pack(">IIBBBBB", frame.shape[1], frame.shape[0], 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(rows, 1)) + chunk(b"IEND", b"")


def flac(sound, rate=32_000):
    pcm = (sound.T * 32768).astype("<i2").tobytes()
    argv = [FFMPEG, "-v", "error", "-f", "s16le", "-ar", str(rate), "-ac", "2", "-i", "-", "-f", "flac", "-"]
    # ffmpeg cannot seek back in a pipe, so the header's length and MD5 stay empty; ComfyUI's are not looked at
    return subprocess.run(argv, input=pcm, capture_output=True, check=True).stdout


class Replay:
    def __init__(self):
        self.vaes = ["minimax_h3_video_vae_fp16.safetensors", "minimax_h3_audio_vae_fp32.safetensors", "pixel_space"]
        self.steps = 2  # looks at the queue that a prompt runs for; None: for ever
        self.others = 0  # prompts of other people ahead in the queue
        self.outcomes = []  # of the next prompts: "oom", "error", "interrupted", "cached", "lost"; else success
        self.late = 0  # looks at the history before it shows what has finished
        self.forced = {}  # path: [(status, body), ...] answered in turn; None as an item closes the connection
        self.missing_nodes = set()
        self.black_vaes = set()
        self.make_frames, self.make_flac = frames_of, lambda audio: flac(sound_of(audio))
        self.requests = []
        self.files = {}  # (type, subfolder, name): bytes
        self.running, self.history, self.hidden = {}, {}, {}
        self.decoded = []  # ids of the prompts that were computed

    def __enter__(self):
        replay = self

        class Handler(_Handler):
            server_state = replay

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._http.daemon_threads = True
        threading.Thread(target=self._http.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        self.url = f"http://127.0.0.1:{self._http.server_port}"
        return self

    def __exit__(self, *error):
        self._http.shutdown()
        self._http.server_close()

    def restart(self):
        """Forget what a restart forgets: queue, history and the temp folder."""
        self.files.clear()
        self.running.clear()
        self.history.clear()
        self.hidden.clear()

    def count(self, method, path):
        return self.requests.count((method, path))

    # each answers (status, JSON or bytes)

    def get(self, path, query):
        if path == "/system_stats":
            return 200, RECORDED["system_stats"]
        if path.startswith("/object_info/"):
            return 200, self._object_info(path.rpartition("/")[2])
        if path == "/queue":
            return 200, self._queue()
        if path.startswith("/history/"):
            return 200, self._history(path.rpartition("/")[2])
        if path == "/view":
            data = self.files.get(tuple(query.get(key, [""])[0] for key in ("type", "subfolder", "filename")))
            return (404, b"") if data is None else (200, data)
        return 404, b"404: Not Found"

    def post(self, path, body):
        if path == "/prompt":
            return self._prompt(json.loads(body))
        if path == "/history":
            for prompt_id in json.loads(body)["delete"]:
                self.history.pop(prompt_id, None)
        elif path == "/interrupt":
            self.running.pop(json.loads(body)["prompt_id"], None)
        elif path not in ("/free", "/queue"):
            return 404, b"404: Not Found"
        return 200, b""

    def _object_info(self, name):
        if name in self.missing_nodes or f"object_info_{name}" not in RECORDED:
            return {}
        info = copy.deepcopy(RECORDED[f"object_info_{name}"])
        if name == "VAELoader":
            info[name]["input"]["required"]["vae_name"][0] = self.vaes
        return info

    def _queue(self):
        for prompt_id, prompt in list(self.running.items()):
            if self.steps is not None and prompt["looks"] >= self.steps:
                self._finish(prompt_id, self.running.pop(prompt_id))
            else:
                prompt["looks"] += 1
        items = [[4, prompt_id, prompt["graph"], {}, ["4"]] for prompt_id, prompt in self.running.items()]
        others = [[n, f"other-{n}", {}, {}, []] for n in range(self.others)]
        return {"queue_running": others or items, "queue_pending": items if others else []}

    def _history(self, prompt_id):
        if prompt_id in self.hidden:
            if self.late > 0:
                self.late -= 1
                return {}
            self.history[prompt_id] = self.hidden.pop(prompt_id)
        return {prompt_id: self.history[prompt_id]} if prompt_id in self.history else RECORDED["history_unknown"]

    def _prompt(self, body):
        graph = body["prompt"]
        if graph["2"]["inputs"]["vae_name"] not in self.vaes:
            return 400, RECORDED["prompt_missing_model"]
        if self._stored(graph) is None:
            return 400, RECORDED["prompt_missing_latent"]
        self.running[body["prompt_id"]] = {"graph": graph, "looks": 0, "client": body.get("client_id")}
        return 200, RECORDED["prompt_ok"] | {"prompt_id": body["prompt_id"]}

    def _stored(self, graph):
        name, _, folder = graph["1"]["inputs"]["latent"].rpartition(" ")
        subfolder, _, name = name.rpartition("/")
        return self.files.get((folder.strip("[]"), subfolder, name))

    def _finish(self, prompt_id, prompt):
        outcome = self.outcomes.pop(0) if self.outcomes else None
        if outcome == "lost":
            return self.restart()
        recorded = {"interrupted": "history_interrupted", "error": "history_error", "oom": "history_error"}
        entry = copy.deepcopy(RECORDED[recorded.get(outcome, "history_done")])
        entry["prompt"] = [4, prompt_id, prompt["graph"], {"client_id": prompt["client"]}, ["4"]]
        if outcome == "oom":
            dict(entry["status"]["messages"])["execution_error"].update(NO_MEMORY, node_type="VAEDecode")
        if outcome is None:
            entry["outputs"] = {"4": self._decode(prompt_id, prompt["graph"])}
        elif outcome == "cached":
            entry["outputs"] = {}
        self.hidden[prompt_id] = entry

    def _decode(self, prompt_id, graph):
        self.decoded.append(prompt_id)
        tensors, _ = container.parse(self._stored(graph))
        values = tensors["latent_tensor"].array()
        if graph["3"]["class_type"] == "LTXVAudioVAEDecode":
            return {"audio": [self._save("flac", self.make_flac(values))]}
        frames = self.make_frames(values, graph["2"]["inputs"]["vae_name"])
        if graph["2"]["inputs"]["vae_name"] in self.black_vaes:
            frames = frames * 0
        return {"images": [self._save("png", png(frame)) for frame in frames]}

    def _save(self, kind, data):
        name = f"ComfyUI_temp_abcde_{len(self.files):05}_.{kind}"
        self.files["temp", "", name] = data
        return {"filename": name, "subfolder": "", "type": "temp"}

    def upload(self, content_type, body):
        form = email.message_from_bytes(b"Content-Type: " + content_type.encode() + b"\r\n\r\n" + body)
        fields = {}
        for part in form.get_payload():
            name = part.get_param("name", header="content-disposition")
            fields[name] = part.get_payload(decode=True)
            if name == "image":
                file_name = part.get_filename()
        key = (fields["type"].decode(), fields["subfolder"].decode(), file_name)
        if key in self.files and fields.get("overwrite") != b"true":
            return 500, b"the tests never upload a name twice"
        self.files[key] = fields["image"]
        return 200, {"name": file_name, "subfolder": key[1], "type": key[0]}


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wbufsize = -1  # one packet an answer: else each waits 40 ms for an acknowledgement
    disable_nagle_algorithm = True

    def log_message(self, *args):
        pass

    def do_GET(self):
        self._serve("GET", b"")

    def do_POST(self):
        self._serve("POST", self.rfile.read(int(self.headers.get("Content-Length", 0))))

    def _serve(self, method, body):
        state, parts = self.server_state, urlsplit(self.path)
        state.requests.append((method, parts.path))
        forced = state.forced.get(parts.path)
        answer = forced.pop(0) if forced else self._answer(method, parts, body)
        if answer is None:
            self.close_connection = True
            return
        status, content = answer
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def _answer(self, method, parts, body):
        state = self.server_state
        if parts.path == "/upload/image":
            return state.upload(self.headers["Content-Type"], body)
        return state.get(parts.path, parse_qs(parts.query)) if method == "GET" else state.post(parts.path, body)
