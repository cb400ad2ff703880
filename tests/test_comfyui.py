"""Decoding through a ComfyUI server, driven over real HTTP against recorded answers and the documented traps."""

import time

import numpy as np
import pytest
from comfyui_replay import FFMPEG, RECORDED, Replay, flac, frames_of, sound_of

from h3spool import comfyui
from h3spool.comfyui_server import Server
from h3spool.errors import BadData, IOFailed, NotPermitted, NotUsable, TryLater

FP16, INT8 = "minimax_h3_video_vae_fp16.safetensors", "minimax_h3_video_vae_int8_convrot.safetensors"
VIDEO = np.random.default_rng(0).standard_normal((1, 24, 7, 2, 4), np.float32)
AUDIO = np.random.default_rng(1).standard_normal((1, 32, 2, 37), np.float32)


@pytest.fixture
def server():
    with Replay() as replay:
        yield replay


def engine(server, **options):
    options = {"poll_s": 0.005, "grace_s": 0.2} | options
    return comfyui.ComfyUI(Server(server.url, timeout_s=options.pop("timeout_s", 5)), ffmpeg=FFMPEG, **options)


def picture(engine, video=VIDEO):
    report = {}
    return np.concatenate(list(engine.frames(video, report))), report


def sound(engine, audio=AUDIO):
    report = {}
    return np.concatenate(list(engine.sound(audio, report)), axis=1), report


# ---------------------------------------------------------------- a good decode


def test_the_picture_comes_back_to_the_bit_in_clips(server):
    report = {}
    clips = list(engine(server).frames(VIDEO, report))
    assert [len(clip) for clip in clips] == [17, 5]
    assert np.array_equal(np.concatenate(clips), frames_of(VIDEO, FP16))
    assert report["clips"] == 2
    assert report["submissions"] == 1
    assert report["fallbacks"] == report["warnings"] == []


def test_the_sound_comes_back_to_the_bit(server):
    samples, report = sound(engine(server))
    assert samples.dtype == np.float32
    assert np.array_equal(samples, sound_of(AUDIO))
    assert report["bits"] == 16


def test_facts_name_server_models_and_node(server):
    facts = engine(server).facts
    assert facts["comfyui"] == "0.33.0"
    assert facts["video_vae"] == {"name": FP16}
    assert facts["audio_vae"] == {"name": "minimax_h3_audio_vae_fp32.safetensors"}
    assert facts["audio_node"] == "LTXVAudioVAEDecode"
    assert facts["device"] == "cpu"


def test_a_still_is_sent_as_two_tokens_and_frame_0_is_kept(server):
    still = VIDEO[:, :, :1]
    frames, _ = picture(engine(server), still)
    assert np.array_equal(frames, frames_of(np.repeat(still, 2, axis=2), FP16)[:1])


def test_nothing_is_left_on_the_server(server):
    decoder = engine(server)
    sound(decoder)
    picture(decoder)
    assert len(server.files) == 22 + 1 + 2
    assert not any(server.files.values())
    assert server.history == {}
    assert {folder for folder, _, _ in server.files} == {"temp"}


def test_progress_tells_that_the_server_is_at_work_but_not_at_each_look(server):
    server.steps = 20
    calls = []
    decoder = engine(server, progress=lambda done, total: calls.append((done, total)))
    picture(decoder)
    assert calls == [(0, 2), (1, 2), (2, 2)]
    sound(decoder)
    assert calls[3:] == [(0, 2)]


# ---------------------------------------------------------------- never twice


def test_the_id_depends_on_the_latent_and_the_vae_alone(server):
    ids = [picture(engine(server))[1]["prompt_id"] for _ in range(2)]
    server.vaes.append(INT8)
    ids += [picture(engine(server, video_vae=INT8))[1]["prompt_id"], picture(engine(server), VIDEO + 1)[1]["prompt_id"]]
    assert ids[0] == ids[1]
    assert len(set(ids)) == 3


class Killed(BaseException):
    pass


def kill_at_work(server):
    """A client that dies once its prompt is in the server's hands."""

    def progress(done, total):
        if server.running:
            raise Killed

    with pytest.raises(Killed):
        picture(engine(server, progress=progress))


def test_a_clip_that_runs_already_is_waited_for(server):
    server.steps = 4
    kill_at_work(server)
    assert picture(engine(server))[1]["submissions"] == 0
    assert server.count("POST", "/prompt") == len(server.decoded) == 1


def test_a_clip_that_is_finished_already_is_fetched(server):
    first = engine(server).frames(VIDEO, {})
    next(first)
    first.close()  # killed after the server was done, before all was fetched
    frames, report = picture(engine(server))
    assert np.array_equal(frames, frames_of(VIDEO, FP16))
    assert report["submissions"] == 0
    assert len(server.decoded) == 1


def test_a_kill_before_the_picture_is_here_does_not_cost_the_sound(server):
    sound(engine(server))
    kill_at_work(server)
    decoder = engine(server)
    samples, report = sound(decoder)
    assert np.array_equal(samples, sound_of(AUDIO))
    assert report["submissions"] == 0
    picture(decoder)
    assert len(server.decoded) == 2
    assert not any(server.files.values())


def test_a_success_whose_files_are_gone_is_decoded_again(server):
    first = engine(server).frames(VIDEO, {})
    next(first)
    first.close()
    server.files.clear()
    _, report = picture(engine(server))
    assert report["submissions"] == 1


def test_an_answer_that_was_lost_does_not_send_the_prompt_twice(server):
    real = server._prompt

    def accept_and_break(body):
        server._prompt = real
        real(body)

    server._prompt = accept_and_break  # the connection closes without an answer
    frames, _ = picture(engine(server))
    assert np.array_equal(frames, frames_of(VIDEO, FP16))
    assert server.count("POST", "/prompt") == 1


# ---------------------------------------------------------------- the traps


def test_a_late_history_is_waited_for(server):
    server.late = 2
    _, report = picture(engine(server))
    assert report["submissions"] == 1


def test_a_clip_lost_by_a_restart_is_sent_again_under_the_same_id(server):
    server.outcomes = ["lost"]
    frames, report = picture(engine(server))
    assert np.array_equal(frames, frames_of(VIDEO, FP16))
    assert report["submissions"] == 2
    assert server.decoded == [report["prompt_id"]]


def test_a_server_that_dies_of_the_clip_is_not_asked_for_ever(server):
    server.outcomes = ["lost"] * 9
    with pytest.raises(IOFailed, match="lost this clip 3 times"):
        picture(engine(server))
    assert len(server.outcomes) == 6


def test_an_upload_that_a_restart_took_is_sent_again(server):
    decoder = engine(server)
    server.forced["/prompt"] = [(400, RECORDED["prompt_missing_latent"])]
    assert picture(decoder)[1]["submissions"] == 2


def test_a_cached_answer_without_files_is_asked_for_under_a_new_name(server):
    server.outcomes = ["cached"]
    _, report = picture(engine(server))
    assert report["submissions"] == 2
    assert len({name for _, folder, name in server.files if folder == "h3spool"}) == 2


def test_200_with_node_errors_is_a_refusal(server):
    decoder = engine(server)
    answer = RECORDED["prompt_ok"] | {"node_errors": RECORDED["prompt_missing_model"]["node_errors"]}
    server.forced["/prompt"] = [(200, answer)]
    with pytest.raises(NotUsable, match="missing in the server's models/vae"):
        picture(decoder)
    assert server.count("POST", "/queue") == 1


@pytest.mark.parametrize(
    ("recorded", "said"),
    [("prompt_missing_model", "nope.safetensors"), ("prompt_missing_node", "NoSuchNode"), ("prompt_bad_id", "UUID")],
)
def test_a_refused_graph_says_why(server, recorded, said):
    decoder = engine(server)
    server.forced["/prompt"] = [(400, RECORDED[recorded])]
    with pytest.raises(NotUsable, match=said):
        picture(decoder)


def test_an_upload_that_is_too_large_names_the_option(server):
    decoder = engine(server)
    server.forced["/upload/image"] = [(413, RECORDED["uploads"][-1]["response"].encode())]
    with pytest.raises(NotUsable, match="--max-upload-size"):
        picture(decoder)


def test_out_of_memory_frees_and_tries_once_more(server):
    server.outcomes = ["oom"]
    frames, _ = picture(engine(server))
    assert np.array_equal(frames, frames_of(VIDEO, FP16))
    assert server.count("POST", "/free") == 1


def test_out_of_memory_twice_is_put_back(server):
    server.outcomes = ["oom", "oom"]
    with pytest.raises(TryLater, match="not enough memory"):
        picture(engine(server))
    assert server.count("POST", "/free") == 1


def test_an_interrupted_decode_is_put_back_and_begins_anew(server):
    server.outcomes = ["interrupted"]
    with pytest.raises(TryLater, match="interrupted"):
        picture(engine(server))
    assert list(server.files.values()) == [b""]  # the upload
    assert picture(engine(server))[1]["submissions"] == 1


def test_a_failed_node_counts_and_says_what_failed(server):
    server.outcomes = ["error"]
    with pytest.raises(IOFailed, match="SaveLatent failed: AttributeError: 'NestedTensor'"):
        picture(engine(server))


def test_a_failure_of_an_earlier_try_is_forgotten(server):
    server.outcomes = ["error"]
    kill_at_work(server)
    frames, report = picture(engine(server))
    assert np.array_equal(frames, frames_of(VIDEO, FP16))
    assert report["submissions"] == 1


def test_a_hung_decode_is_interrupted(server):
    server.steps = None
    with pytest.raises(IOFailed, match=r"did not end in 0\.05 s and was interrupted"):
        picture(engine(server, patience_s=0.05))
    assert server.count("POST", "/interrupt") == 1


def test_a_queue_that_does_not_move_is_left(server):
    server.steps, server.others = None, 3
    with pytest.raises(TryLater, match="pending, 3 others"):
        picture(engine(server, patience_s=0.05))
    assert server.count("POST", "/interrupt") == 0


def test_a_disconnect_while_waiting_or_fetching_is_survived_or_put_back(server):
    server.forced["/queue"] = [None]
    assert picture(engine(server))[1]["submissions"] == 1
    server.forced["/view"] = [None]
    with pytest.raises(TryLater, match="connection broke"):
        picture(engine(server))


def test_a_server_that_stays_away_is_put_back(server):
    decoder = engine(server)
    server.forced["/queue"] = [(503, b"starting")] * 999
    with pytest.raises(TryLater, match="503"):
        picture(decoder)


def test_a_server_that_hangs_is_put_back(server):
    decoder = engine(server, timeout_s=0.05, grace_s=0)
    real = server._queue
    server._queue = lambda: time.sleep(0.5) or real()
    with pytest.raises(TryLater, match="no answer in time"):
        picture(decoder)


# ---------------------------------------------------------------- wrong results


def test_too_few_frames_are_refused(server):
    server.make_frames = lambda video, vae: frames_of(video, vae)[:-1]
    with pytest.raises(IOFailed, match="made 21 frames, 22 were expected"):
        picture(engine(server))


def test_frames_of_another_size_are_refused(server):
    server.make_frames = lambda video, vae: frames_of(video, vae)[:, :8]
    with pytest.raises(IOFailed, match="64x8"):
        picture(engine(server))


def test_damaged_pictures_are_refused(server):
    decoder = engine(server)
    real = server._save
    server._save = lambda kind, data: real(kind, data[:-40])
    with pytest.raises(IOFailed, match="ffmpeg says"):
        picture(decoder)


def test_sound_of_another_rate_is_refused(server):
    server.make_flac = lambda audio: flac(sound_of(audio), 44_100)
    with pytest.raises(NotUsable, match="44100 Hz"):
        sound(engine(server))


def test_exactly_black_frames_are_a_warning(server):
    def partly(video, vae):
        frames = frames_of(video, vae)
        frames[18] = 0
        return frames

    server.make_frames = partly
    assert picture(engine(server))[1]["warnings"] == ["frames [18] are exactly black, which is how ComfyUI saves NaN"]


def test_a_black_int8_decode_gives_way_to_fp16(server):
    server.vaes.append(INT8)
    server.black_vaes.add(INT8)
    frames, report = picture(engine(server, video_vae=f"/models/{INT8}"))
    assert np.array_equal(frames, frames_of(VIDEO, FP16))
    assert report["fallbacks"] == [{"clip": 0, "from": INT8, "to": FP16}]
    assert not any(server.files.values())


def test_a_good_int8_decode_stays(server):
    server.vaes.append(INT8)
    frames, report = picture(engine(server, video_vae=INT8))
    assert np.array_equal(frames, frames_of(VIDEO, INT8))
    assert len(server.decoded) == 1
    assert report["fallbacks"] == []


@pytest.mark.parametrize("shape", [(24, 7, 2, 4), (1, 16, 7, 2, 4)])
def test_a_wrong_shape_is_not_sent(server, shape):
    with pytest.raises(BadData):
        picture(engine(server), np.zeros(shape, np.float32))
    assert server.count("POST", "/upload/image") == 0


# ---------------------------------------------------------------- the server itself


def test_no_server_is_try_later():
    with pytest.raises(TryLater, match="nothing answers"):
        comfyui.ComfyUI(Server("http://127.0.0.1:9"), ffmpeg=FFMPEG)


@pytest.mark.parametrize("url", ["http://192.0.2.1:8188", "http://decoder.example:8192", "http://0.0.0.0:8192"])
def test_a_remote_url_is_refused_with_the_tunnel_to_use(url):
    with pytest.raises(NotPermitted, match=r"ssh -N -L 8\d\d\d:127.0.0.1:8\d\d\d"):
        Server(url)
    Server(url, allow_remote=True)


def test_a_password_stays_out_of_the_facts():
    assert Server("http://me:secret@127.0.0.1:8192/").url == "http://127.0.0.1:8192"


@pytest.mark.parametrize("url", ["127.0.0.1:8192", "ftp://127.0.0.1", "http://"])
def test_what_is_no_url_is_refused(url):
    with pytest.raises(NotUsable):
        Server(url)


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        ((200, b"<html>"), NotUsable),
        ((404, b"no"), NotUsable),
        ((401, b"login"), NotPermitted),
        ((200, b"[]"), NotUsable),
    ],
)
def test_another_server_is_told_from_comfyui(server, answer, error):
    server.forced["/system_stats"] = [answer]
    with pytest.raises(error):
        engine(server)


def test_missing_nodes_and_models_are_named(server):
    server.missing_nodes = {"LTXVAudioVAEDecode"}
    with pytest.raises(NotUsable, match="LTXVAudioVAEDecode"):
        engine(server)
    server.missing_nodes, server.vaes = set(), ["pixel_space"]
    with pytest.raises(NotUsable, match="no video VAE"):
        engine(server)
    with pytest.raises(NotUsable, match=r"no x\.safetensors in models/vae; it offers pixel_space"):
        engine(server, video_vae="x.safetensors")
    server.vaes = [FP16]
    with pytest.raises(NotUsable, match="no audio VAE"):
        sound(engine(server))
