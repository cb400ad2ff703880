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


@pytest.mark.parametrize("length", [1, 2, 37, 200])  # 200: three chunks here, one piece there
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


def test_chunks_are_two_seconds_and_come_in_order(net):
    with torch.inference_mode():
        sizes = [chunk.shape[1] // 800 for chunk in net(latent(170))]
    assert sizes == [80, 80, 10]


def test_context_is_as_long_as_a_latent_reaches(net):
    """A change 24 latents away is not heard, one 23 latents away is: less context would change samples."""
    z = latent(61)
    with torch.inference_mode():
        whole = net.decoder(net.dec_in_proj(z), audio.resampling_filter())[:, 0]
        z[:, :, 30] += 3
        changed = (net.decoder(net.dec_in_proj(z), audio.resampling_filter())[:, 0] - whole).abs().amax(0) > 0
    heard = changed.nonzero().flatten()
    assert heard.min() >= 800 * (30 - audio.CONTEXT)
    assert heard.max() < 800 * (31 + audio.CONTEXT)


def test_channels_do_not_hear_each_other(net):
    z = latent(5)
    silent_right = z.clone()
    silent_right[1] = 0
    torch.testing.assert_close(wave(net, silent_right)[0], wave(net, z)[0], rtol=0, atol=1e-6)


def test_filter_is_the_one_that_the_files_carry():
    carried = audio_weights()["decoder.activation_post.upsample.filter"].flatten()
    torch.testing.assert_close(audio.resampling_filter(), carried, rtol=0, atol=1e-7)
