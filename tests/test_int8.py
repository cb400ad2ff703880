"""INT8 ConvRot: comfy-kitchen's arithmetic bit for bit, every spelling of the format, and a bad clip that is mended."""

import gc
import json
import subprocess
import sys
from functools import partial

import comfy_kitchen
import numpy as np
import pytest
import torch
from conftest import make_clip
from golden import h3_weights as h3
from safetensors.torch import load_file, save_file

from h3spool import decode, errors
from h3spool.vae import cpu, int8, quantize, video, weights

CPU = torch.device("cpu")
NOTHING = lambda done, total: None  # noqa: E731


def layer(outputs=96, inputs=512, group=256, rows=33, seed=0):
    draw = torch.Generator().manual_seed(seed)
    x, weight, bias = (torch.randn(*shape, generator=draw) for shape in ((rows, inputs), (outputs, inputs), (outputs,)))
    x[3] = 0
    return x, *int8.quantise(weight, group), bias, weight


# ---- the arithmetic ----


@pytest.mark.parametrize("group", [4, 16, 64, 256])
def test_the_rotation_is_symmetric_its_own_inverse_and_keeps_sums(group):
    h = int8.hadamard(group, CPU)
    assert torch.equal(h, h.T) and torch.equal(h @ h, torch.eye(group))
    assert torch.equal(h.sum(dim=1), torch.ones(group)) and h.abs().unique().numel() == 1


@pytest.mark.parametrize(("outputs", "inputs"), [(6144, 2048), (2048, 8192)])
def test_the_reference_is_comfy_kitchens_eager_backend_bit_for_bit(outputs, inputs):
    x, codes, scale, bias, _ = layer(outputs, inputs, rows=17)
    theirs = comfy_kitchen.int8_linear(
        x, codes, scale, bias, out_dtype=torch.float32, convrot=True, convrot_groupsize=256
    )
    assert torch.equal(int8.reference(x, codes, scale, bias, 256), theirs)


def test_quantising_is_comfy_kitchens_bit_for_bit():
    weight = torch.randn(64, 1024, generator=torch.Generator().manual_seed(1))
    codes, scale = comfy_kitchen.quantize_int8_rowwise(int8.rotate(weight, 256))
    ours, our_scale = int8.quantise(weight, 256)
    assert torch.equal(ours, codes) and torch.equal(our_scale, scale.reshape(-1, 1))


def test_dequantising_loses_what_eight_bits_lose():
    _, codes, scale, _, weight = layer(512, 2048)
    assert 41 < int8.snr_db(weight, int8.dequantise(codes, scale, 256)) < 43  # 41.65 measured on full-width layers
    assert int8.snr_db(weight, codes.float() * scale) < 0  # forgetting the rotation


@pytest.mark.parametrize("rows", [1, 16, 17, 305, 609])
def test_the_integer_product_is_the_reference(rows):
    x, codes, scale, bias, _ = layer(rows=rows + 4)
    wanted = int8.reference(x, codes, scale, bias, 256)
    got = int8.integer_product(x, codes, scale, bias, 256)
    assert float((got - wanted).norm() / wanted.norm()) < 2e-4 and int8.snr_db(wanted, got) > 74


@pytest.mark.parametrize(("outputs", "inputs"), [(6144, 2048), (2048, 8192)])
def test_rotating_in_bfloat16_moves_codes_by_one_and_loses_less_than_half_a_decibel(outputs, inputs):
    x, codes, scale, bias, weight = layer(outputs, inputs, rows=33)
    wide, narrow = (
        int8.round_rows(int8.rotate(x.to(dtype), 256))[0].int() for dtype in (torch.float32, torch.bfloat16)
    )
    assert (wide - narrow).abs().max() == 1
    exact = torch.nn.functional.linear(x, weight, bias)
    got = int8.integer_product(x, codes, scale, bias, 256, torch.bfloat16)
    assert int8.snr_db(exact, int8.reference(x, codes, scale, bias, 256)) - int8.snr_db(exact, got) < 0.5
    product = partial(int8.integer_product, turning=torch.bfloat16)
    assert int8.self_test(product, CPU, torch.bfloat16) == "" and int8.self_test(product, CPU) != ""


@pytest.mark.parametrize("group", [0, 256])
def test_a_product_leaves_what_it_was_given_as_it_was(group):
    x, _, _, bias, weight = layer()
    before, weight_before = x.clone(), weight.clone()
    codes, scale = int8.quantise(weight, group)
    for product in (int8.reference, int8.integer_product):
        product(x, codes, scale, bias, group)
    assert torch.equal(x, before) and torch.equal(weight, weight_before)


def test_a_quotient_that_rounds_to_128_does_not_wrap():
    codes, _ = int8.round_rows(torch.tensor([[1.0, -1.0, 0.9999999]]))
    assert codes.tolist() == [[127, -127, 127]]


def test_half_precision_of_the_rotation_is_not_trusted():
    """256 values of 10,000 whose signs agree with a row of H sum to 160,000, which float16 does not hold."""
    x = 160_000 * int8.hadamard(256, CPU)[:2]
    assert torch.isinf(int8.rotate(x.half(), 256)).any()
    codes, scale = int8.round_rows(int8.rotate(x, 256))
    assert torch.isfinite(scale).all() and codes.abs().max() == 127


@pytest.mark.parametrize(
    ("capability", "cuda", "kitchen", "name"),
    [
        ((7, 0), "13.0", True, "de-quantised: sm70 has no int8"),
        ((7, 5), "13.0", True, "comfy-kitchen"),
        ((8, 6), "13.0", True, "comfy-kitchen"),
        ((8, 6), "12.8", True, "torch integer product (comfy-kitchen needs CUDA 13)"),
        ((8, 6), "13.0", False, "torch integer product (comfy-kitchen is not installed)"),
        ((9, 0), "13.0", True, "de-quantised: int8 is slower than fp16 on sm90"),
    ],
)
def test_each_card_gets_its_way(monkeypatch, capability, cuda, kitchen, name):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    if not kitchen:
        monkeypatch.setitem(sys.modules, "comfy_kitchen", None)
    found = int8._cuda_candidate(torch.device("cuda"))
    assert found.name.startswith(name) and (found.product is None) == name.startswith("de-quantised")


@pytest.mark.parametrize("capability", [(7, 5), (8, 6)])
@pytest.mark.parametrize("inputs", [2048, 8192])
def test_comfy_kitchen_is_given_what_it_needs(monkeypatch, capability, inputs):
    """Its eager code here, its kernels there. On Turing ff.w2 is ours: its rotation there overflows float16."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    x, _, _, bias, weight = layer(64, inputs, rows=5)
    codes, scale = int8.quantise(0.003 * weight, 256)
    loud = (40_000 * int8.hadamard(256, CPU).sign()[:1]).tile(inputs // 256)  # one value of each group becomes 640,000
    rows = torch.cat([x, loud]) if inputs == 8192 and capability == (7, 5) else x
    got = int8.kitchen_product(rows.half(), codes, scale, bias, 256)
    wanted = int8.reference(rows.half().float(), codes, scale, bias, 256)
    assert got.dtype == torch.float16
    assert int8.snr_db(wanted, got.float()) > 45
    assert torch.isinf(int8.rotate(loud.half(), 256)).any()


def test_the_self_test_finds_a_product_that_is_off():
    assert int8.self_test(int8.reference, CPU) == int8.self_test(int8.integer_product, CPU) == ""
    off = lambda *args: int8.reference(*args) * 1.01  # noqa: E731
    assert "relative error" in int8.self_test(off, CPU)
    assert "dB worse" in int8.self_test(off, CPU, torch.bfloat16)
    assert int8.self_test(lambda *args: int8.reference(*args) * float("nan"), CPU) == "not finite"


# ---- the format ----

VIDEO = h3.video_weights(64, 2) | {"latents_mean": torch.zeros(24), "latents_std": torch.ones(24)}


@pytest.fixture
def quantised(tmp_path):
    source = h3.save(tmp_path / "float.safetensors", VIDEO, dtype=torch.float16)
    quantize.quantize(source, tmp_path / "int8.safetensors", NOTHING)
    return tmp_path / "int8.safetensors"


def decoded(path, precision="fp32", **size):
    engine = decode.Decoder(path, None, precision=precision)
    return np.concatenate(list(engine.frames(make_clip(**size or {"tokens": 7})[0], {})))


def rewritten(path, change):
    state = load_file(path)
    save_file(change(state), path.with_name("other.safetensors"))
    return path.with_name("other.safetensors")


def described(state, facts):
    blob = torch.frombuffer(bytearray(json.dumps(facts).encode()), dtype=torch.uint8)
    return {key: blob.clone() if key.endswith(".comfy_quant") else value for key, value in state.items()}


def test_every_spelling_of_the_scale_loads_alike(quantised):
    flat = rewritten(quantised, lambda state: {k: v.flatten() if k.endswith("_scale") else v for k, v in state.items()})
    assert np.array_equal(decoded(quantised), decoded(flat))


def test_one_scale_for_a_whole_tensor_loads(quantised):
    one = rewritten(
        quantised, lambda state: {k: v.max().reshape(()) if k.endswith("_scale") else v for k, v in state.items()}
    )
    assert decoded(one).shape == (22, 32, 32, 3)


def test_nested_and_padded_descriptions_load(quantised):
    def change(state):
        for key in [key for key in state if key.endswith(".comfy_quant")]:
            facts = json.loads(bytes(state[key].tolist()))
            nested = json.dumps({"format": facts.pop("format"), "params": facts}).encode() + bytes(3)
            state[key] = torch.frombuffer(bytearray(nested), dtype=torch.uint8).clone()
        return state

    assert np.array_equal(decoded(quantised), decoded(rewritten(quantised, change)))
    assert int8.group_of(b'{"format": "int8_tensorwise"}', "x") == 0


def test_rows_without_rotation_load(quantised):
    def change(state):
        for key in [key for key in state if key.endswith(".comfy_quant")]:
            name = key.removesuffix(".comfy_quant")
            state[f"{name}.weight"], state[f"{name}.weight_scale"] = int8.quantise(VIDEO[f"{name}.weight"].float(), 0)
        return described(state, {"format": "int8_tensorwise"})

    assert np.abs(decoded(rewritten(quantised, change)).astype(int) - decoded(quantised)).mean() < 3


@pytest.mark.parametrize("kind", ["int8_blockwise", "convrot_w4a4", "asym_w4a8_int8", "float8_e4m3fn"])
def test_other_quantisations_are_refused_by_name(quantised, kind):
    other = rewritten(quantised, lambda state: described(state, {"format": kind}))
    with pytest.raises(errors.NotUsable, match=kind):
        weights.load_video(other, torch.float32, CPU)


def test_int8_without_a_description_is_refused(quantised):
    bare = rewritten(quantised, lambda state: {k: v for k, v in state.items() if not k.endswith(".comfy_quant")})
    with pytest.raises(errors.NotUsable, match="QuaRot"):
        weights.load_video(bare, torch.float32, CPU)


def test_float8_and_gguf_are_refused_by_name(tmp_path):
    key = "decoder.transformer_blocks.0.ff.w1.weight"
    state = VIDEO | {key: VIDEO[key].to(torch.float8_e4m3fn)}
    save_file({k: v.contiguous() for k, v in state.items()}, tmp_path / "f8.safetensors")
    with pytest.raises(errors.NotUsable, match="F8_E4M3"):
        weights.load_video(tmp_path / "f8.safetensors", torch.float32, CPU)
    (tmp_path / "x.gguf").write_bytes(b"GGUF" + bytes(100))
    with pytest.raises(errors.NotUsable, match="GGUF"):
        weights.load_video(tmp_path / "x.gguf", torch.float32, CPU)


@pytest.mark.parametrize("bad", [0.0, float("nan"), float("inf")])
def test_a_scale_that_is_no_scale_is_refused(quantised, bad):
    def change(state):
        state["decoder.transformer_blocks.1.ff.w2.weight_scale"][5] = bad
        return state

    with pytest.raises(errors.NotUsable, match="positive scale"):
        weights.load_video(rewritten(quantised, change), torch.float32, CPU)


def test_int8_is_refused_for_a_float_file(tmp_path):
    source = h3.save(tmp_path / "float.safetensors", VIDEO)
    with pytest.raises(errors.NotUsable, match="h3spool quantize"):
        decode.Decoder(source, None, precision="int8")


# ---- quantize ----


def test_the_quantised_file_is_as_published(quantised):
    state = load_file(quantised)
    linears = [key.removesuffix(".comfy_quant") for key in state if key.endswith(".comfy_quant")]
    assert len(linears) == 8
    for name in linears:
        codes, scale = state[f"{name}.weight"], state[f"{name}.weight_scale"]
        wanted, wanted_scale = int8.quantise(VIDEO[f"{name}.weight"].half().float(), int8.group_for(codes.shape[1]))
        assert torch.equal(codes, wanted) and torch.equal(scale, wanted_scale)
        assert state[f"{name}.bias"].dtype == scale.dtype == torch.float32
    full = int8.marker(256)
    assert full == b'{"format": "int8_tensorwise", "convrot": true, "convrot_groupsize": 256}' and len(full) == 72


def test_the_encoder_comes_along_with_kernels_in_half(tmp_path):
    source = h3.save(tmp_path / "float.safetensors", VIDEO | h3.video_encoder())
    facts = quantize.quantize(source, tmp_path / "int8.safetensors", NOTHING)
    state = load_file(tmp_path / "int8.safetensors")
    assert facts["encoder"] and set(h3.video_encoder()) <= set(state)
    for key, value in state.items():
        if key.startswith("encoder."):
            assert value.dtype == (torch.float16 if value.ndim > 1 else torch.float32)


def test_quantising_holds_one_linear_at_a_time(tmp_path):
    """Of five more blocks of 256, whose linears are 21 MB in float32 and 5 MB in int8, no tensor stays."""

    def made_bytes():
        tensors = [each for each in gc.get_objects() if issubclass(type(each), torch.Tensor) and each.device == CPU]
        return sum(each.numel() * each.element_size() for each in tensors if each.dtype in (torch.float32, torch.int8))

    def most_held(blocks):
        source = h3.save(tmp_path / f"{blocks}.safetensors", h3.video_weights(256, blocks), dtype=torch.float16)
        gc.collect()
        held, before = [], made_bytes()
        quantize.quantize(source, tmp_path / f"{blocks}.int8", lambda *_: held.append(made_bytes() - before))
        assert len(held) == 4 * blocks
        return max(held)

    one, six = most_held(1), most_held(6)
    assert 0 < one < 6e6 and six < one + 1e5


@pytest.mark.parametrize("convert", [lambda state: state, h3.to_diffusers])
def test_every_layout_quantises_to_the_same_file(tmp_path, quantised, convert):
    source = h3.save(tmp_path / "x.safetensors", convert(h3.video_weights(64, 2)), dtype=torch.float16)
    quantize.quantize(source, tmp_path / "y.safetensors", NOTHING)
    ours, wanted = load_file(tmp_path / "y.safetensors"), load_file(quantised)
    assert all(torch.equal(ours[key], wanted[key]) for key in ours if not key.startswith(("latents", "decoder.mask")))


def test_quantize_check_compares_the_decodes(tmp_path, program):
    from h3spool import container

    source = h3.save(tmp_path / "float.safetensors", VIDEO, dtype=torch.float16)
    video, audio = (container.tensor_of(stream) for stream in make_clip())
    raw = container.serialize({"video": video, "audio": audio}, {})
    (tmp_path / "clip.safetensors").write_bytes(b"".join(raw))
    target = tmp_path / "int8.safetensors"
    done = program("quantize", source, target, "--check", tmp_path / "clip.safetensors", "--json")
    facts = json.loads(done.out)
    assert done.code == 0 and target.exists()
    assert 30 < facts["psnr_db"] < 70 and set(facts["snr_db"]) == set(quantize.LINEARS)
    assert program("quantize", target, tmp_path / "again.safetensors").code == 78
    assert not list(tmp_path.glob(".*"))


# ---- decoding ----


@pytest.mark.parametrize("abilities", [{"avx512_vnni"}, {"avx512_vnni", "avx512_bf16"}])
def test_a_processor_with_vnni_multiplies_integers(quantised, monkeypatch, abilities):
    """The way taken there, on this processor: strips of rows, and with bfloat16 its rotation and attention."""
    size = {"tokens": 7, "height": 8, "width": 8}  # 453 tokens, two strips
    wanted = decoded(quantised, **size)
    cached = int8.backend, video.packed_dtypes
    monkeypatch.setattr(cpu, "flags", lambda: abilities)
    for function in cached:
        function.cache_clear()
    try:
        engine, report = decode.Decoder(quantised, None), {}
        got = np.concatenate(list(engine.frames(make_clip(**size)[0], report)))
    finally:
        for function in cached:
            function.cache_clear()
    assert engine.facts["precision"] == "int8" and not report["fallbacks"]
    off = np.abs(got.astype(int) - wanted)
    assert 0 < off.mean() < 1 and off.max() < 8


def fragile(state, factor=2.0**14):
    """The same function, but the gated product of block 1 leaves float16: value rows scaled up, w2 scaled down."""
    state = {key: value.clone().float() for key, value in state.items()}
    at = "decoder.transformer_blocks.1.ff."
    half = len(state[f"{at}w1.weight"]) // 2
    for key in ("w1.weight", "w1.bias"):
        state[f"{at}{key}"][half:] *= factor
    state[f"{at}w2.weight"] /= factor
    return state


@pytest.mark.parametrize("storage", ["float", "int8"])
def test_a_clip_that_overflows_float16_is_mended_in_float32(tmp_path, storage):
    path = h3.save(tmp_path / "float.safetensors", fragile(VIDEO))
    whole = h3.save(tmp_path / "whole.safetensors", VIDEO)
    if storage == "int8":
        for name in (path, whole):
            quantize.quantize(name, name.with_suffix(".int8"), NOTHING)
        path, whole = path.with_suffix(".int8"), whole.with_suffix(".int8")
    report: dict = {}
    frames = np.concatenate(list(decode.Decoder(path, None, precision="fp16").frames(make_clip(tokens=7)[0], report)))
    assert report["fallbacks"] == [{"clip": 0, "from": "fp16", "to": "fp32"}]
    assert np.abs(frames.astype(int) - decoded(whole)).max() <= 1


@pytest.mark.parametrize("layout", ["official", "diffusers"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_mending_uses_the_weights_as_stored_not_as_narrowed(tmp_path, dtype, layout):
    """Weights of 2^20 are infinite in float16."""
    state = fragile(VIDEO, 2.0**20)
    path = h3.save(tmp_path / "x.safetensors", h3.to_diffusers(state) if layout == "diffusers" else state, dtype=dtype)
    report: dict = {}
    engine = decode.Decoder(path, None, precision="fp16")
    frames = np.concatenate(list(engine.frames(make_clip(tokens=7)[0], report)))
    assert report["fallbacks"] == [{"clip": 0, "from": "fp16", "to": "fp32"}]
    assert np.array_equal(frames, decoded(path))


MENDING = """
import sys
import numpy as np, torch
from h3spool.decode import Decoder
torch.set_num_threads(1)
engine = Decoder(sys.argv[1], None, precision="fp16", device="cpu")
report = {}
for _ in engine.frames(np.random.default_rng(0).standard_normal((1, 24, 2, 2, 2), np.float32), report):
    pass
print(len(report["fallbacks"]), report["peak_memory_bytes"])
"""


def test_mending_a_clip_costs_the_memory_of_a_block_not_of_a_model(tmp_path):
    """From an int8 file, 12 blocks of 512: float32 weights of a block are 17 MB, of the model 201 MB."""
    draw = h3.video_weights(512, 12)
    peaks = {}
    for name, state in (("sound", draw), ("fragile", fragile(draw))):
        source = h3.save(tmp_path / f"{name}.safetensors", state)
        quantize.quantize(source, tmp_path / f"{name}.int8", NOTHING)
        argv = [sys.executable, "-c", MENDING, tmp_path / f"{name}.int8"]
        done = subprocess.run(argv, capture_output=True, text=True, check=True)
        fallbacks, peak = map(int, done.stdout.split())
        assert fallbacks == (name == "fragile")
        peaks[name] = peak
    assert peaks["fragile"] - peaks["sound"] < 4 * 17e6
