"""The audio decoder: against diffusers on the same weights, against a recorded waveform, in chunks and whole."""

from pathlib import Path

import pytest
import torch
from golden.h3_weights import audio_weights, save
from safetensors.torch import load_file

from h3spool.vae import audio, weights

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def net(tmp_path_factory):
    path = save(tmp_path_factory.mktemp("vae") / "audio.safetensors", audio_weights())
    return weights.load_audio(path, CPU)[0]


def latent(length, seed=6):
    return torch.randn(2, 32, length, generator=torch.Generator().manual_seed(seed))


@torch.inference_mode()
def wave(net, z):
    return torch.cat(list(net(z)), dim=1)


@pytest.fixture(scope="module")
def theirs():
    diffusers = pytest.importorskip("diffusers")
    vae = diffusers.AutoencoderKLMiniMaxH3Audio(encoder_dim=4, latent_dim=64, num_attention_heads=2, decoder_dim=128)
    missing, unexpected = vae.load_state_dict(audio_weights(), strict=False)
    assert not unexpected
    assert all(key.startswith(("encoder.", "pre_block.", "mean_proj.", "logs_proj.")) for key in missing)
    return vae.eval()


@pytest.mark.parametrize("length", [1, 2, 37])
def test_sound_is_what_diffusers_decodes(net, theirs, length):
    z = latent(length)
    scaled = z * torch.tensor(audio.LATENTS_STD)[:, None] + torch.tensor(audio.LATENTS_MEAN)[:, None]
    with torch.inference_mode():
        expected = theirs.decode(scaled).sample[:, 0]
    ours = wave(net, z)
    assert ours.shape == (2, 800 * length)
    torch.testing.assert_close(ours, expected, rtol=0, atol=1e-5)


def test_recorded_waveform(net):
    recorded = load_file(Path(__file__).parent / "golden" / "waveform.safetensors")["wave"]
    torch.testing.assert_close(wave(net, latent(9)), recorded, rtol=0, atol=1e-5)


@pytest.mark.parametrize(("length", "chunks"), [(40, [40]), (41, [21, 20]), (81, [27, 27, 27])])
def test_chunks_are_equal_and_sound_like_the_whole(net, monkeypatch, length, chunks):
    z = latent(length)
    whole = wave(net, z)
    monkeypatch.setattr(audio, "CHUNK", 40)
    with torch.inference_mode():
        pieces = list(net(z))
    assert [piece.shape[1] // 800 for piece in pieces] == chunks
    torch.testing.assert_close(torch.cat(pieces, dim=1), whole, rtol=0, atol=1e-5)


def test_context_is_as_long_as_a_latent_reaches(net):
    """A change of one latent is heard 24 latents away at most: so much context makes chunks exact."""
    z = latent(51)
    before = wave(net, z)
    z[:, :, 25] += 3
    changed = (wave(net, z) - before).abs().amax(0) > 0
    heard = changed.nonzero().flatten()
    assert heard.min() >= 800 * (25 - audio.CONTEXT)
    assert heard.max() < 800 * (26 + audio.CONTEXT)


def test_channels_do_not_hear_each_other(net):
    z = latent(5)
    silent_right = z.clone()
    silent_right[1] = 0
    torch.testing.assert_close(wave(net, silent_right)[0], wave(net, z)[0], rtol=0, atol=1e-6)


def test_filter_is_the_one_that_the_files_carry():
    carried = audio_weights()["decoder.activation_post.upsample.filter"].flatten()
    torch.testing.assert_close(audio.resampling_filter(), carried, rtol=0, atol=1e-7)
