"""The MiniMax H3 audio decoder: latents at 40 Hz -> waveform at 32 kHz, BigVGAN with alias-free SnakeBeta.

Always float32: bfloat16 is audibly broken. The network is mono; the two channels are two items of a batch (B = 2).
Attribute names are the keys of the ComfyUI checkpoint (weight norm folded). The 254 identical 12-tap filters that the
files carry are computed instead.
"""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

CHANNELS = 32  # of the latent
SAMPLES = 800  # per latent
SAMPLE_RATE_HZ = 32000
RATES, KERNELS = (5, 5, 2, 2, 2, 2, 2), (9, 9, 4, 4, 4, 4, 4)  # of the upsampling convolutions
RES_KERNELS, DILATIONS = (3, 7, 11), (1, 3, 5)  # of the residual blocks
TAPS, CUTOFF, BETA = 12, 0.25, 4.6638  # of the resampling filter: Kaiser-windowed sinc
CHUNK, CONTEXT = 240, 24  # latents (6 s); one latent reaches 23.7 latents far, so 24 of context make chunks exact

LATENTS_MEAN = (
    -0.020211687488382354, 0.3876466479950502, -0.04398279799186767, -0.28591514936373,
    0.08179686214561671, -0.35782641352446604, 0.040623809960919084, -0.01552534501956604,
    -0.223362481667332, 0.1821006842509091, 0.2941778783780663, -0.07901167601970885,
    -0.056815072777201, -0.3699028221860095, -0.31616315591624855, 0.5905951377425391,
    -0.052139568068853864, 0.013673160263486295, -0.03691647864630577, 0.09732660653298163,
    -0.3394662328788498, -0.30685677538541667, -0.24504598907458763, -0.034698524462007344,
    0.02868032184767538, -0.21217779266454084, -0.1678263169941987, 0.3221287889040614,
    -0.1223055851554907, 0.4356604928128464, -0.0502599202236253, 0.3979258376211797,
)  # fmt: skip
LATENTS_STD = (
    1.6895524230479284, 2.76263727217653, 1.7945344281264435, 1.6801681847309828,
    1.6390226546605453, 2.7788298348882177, 1.7659090095747236, 1.6199757612137327,
    2.6336525640336896, 1.8539356672817833, 2.5056497896915633, 1.811019237886178,
    1.9579657790720237, 1.6685498243529284, 1.4922469314453364, 3.298670198067373,
    1.9491804496832168, 1.8720003270431442, 1.8334080103291832, 1.6488070416529093,
    1.6176957696319716, 1.9131449234774398, 1.5695245398428617, 1.6943659940415912,
    1.8318420762504692, 1.5540637421583379, 1.9344930328968526, 1.599198216109855,
    1.718045989838149, 1.6307219190837705, 1.8661226051202384, 1.5613768203168363,
)  # fmt: skip


def resampling_filter() -> Tensor:
    """The low-pass of every resampler: [12], symmetric, sums to 1."""
    place = torch.arange(TAPS, dtype=torch.float64) - (TAPS - 1) / 2
    window = torch.kaiser_window(TAPS, periodic=False, beta=BETA, dtype=torch.float64)
    taps = window * torch.sinc(2 * CUTOFF * place)
    return (taps / taps.sum()).float()


class SnakeBeta(nn.Module):
    """Gains of the periodic activation, one per channel, stored as logarithms."""

    def __init__(self, channels: int):
        super().__init__()
        self.alpha = nn.Parameter(torch.empty(channels), requires_grad=False)
        self.beta = nn.Parameter(torch.empty(channels), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        """x: [B, C, n] -> x + sin(e^alpha x)^2 / e^beta."""
        wave = (x * self.alpha.exp()[:, None]).sin_().square_()
        return wave.mul_((self.beta.exp() + 1e-9).reciprocal()[:, None]).add_(x)


class Activation(nn.Module):
    """SnakeBeta at twice the rate, so that its overtones do not alias."""

    def __init__(self, channels: int):
        super().__init__()
        self.act = SnakeBeta(channels)

    def forward(self, x: Tensor, taps: Tensor) -> Tensor:
        """x: [B, C, n], taps: [12] -> [B, C, n]."""
        channels = x.shape[1]
        kernel = taps.expand(channels, 1, TAPS)
        x = F.conv_transpose1d(F.pad(x, (5, 5), mode="replicate"), 2 * kernel, stride=2, groups=channels)[..., 15:-15]
        return F.conv1d(F.pad(self.act(x), (5, 6), mode="replicate"), kernel, stride=2, groups=channels)


class ResidualBlock(nn.Module):
    """Three pairs of convolutions, the first of each dilated."""

    def __init__(self, channels: int, kernel: int):
        super().__init__()
        half = (kernel - 1) // 2
        self.convs1 = nn.ModuleList(
            nn.Conv1d(channels, channels, kernel, dilation=d, padding=d * half) for d in DILATIONS
        )
        self.convs2 = nn.ModuleList(nn.Conv1d(channels, channels, kernel, padding=half) for _ in DILATIONS)
        self.activations = nn.ModuleList(Activation(channels) for _ in range(2 * len(DILATIONS)))

    def forward(self, x: Tensor, taps: Tensor) -> Tensor:
        """x: [B, C, n] -> the same shape."""
        for p, (first, second) in enumerate(zip(self.convs1, self.convs2, strict=True)):
            y = first(self.activations[2 * p](x, taps))
            x = second(self.activations[2 * p + 1](y, taps)).add_(x)
        return x


class Vocoder(nn.Module):
    """The `decoder.` part of the checkpoint."""

    def __init__(self, inputs: int, width: int):
        super().__init__()
        self.conv_pre = nn.Conv1d(inputs, width, 7, padding=3)
        widths = [width >> stage for stage in range(len(RATES) + 1)]
        self.ups = nn.ModuleList(
            nn.ModuleList([nn.ConvTranspose1d(i, o, k, stride=r, padding=(k - r) // 2)])
            for i, o, k, r in zip(widths, widths[1:], KERNELS, RATES, strict=False)
        )
        self.resblocks = nn.ModuleList(ResidualBlock(c, k) for c in widths[1:] for k in RES_KERNELS)
        self.activation_post = Activation(widths[-1])
        self.conv_post = nn.Conv1d(widths[-1], 1, 7, padding=3, bias=False)

    def forward(self, x: Tensor, taps: Tensor) -> Tensor:
        """x: [B, inputs, n] -> [B, 1, 800 * n] in [-1, 1]."""
        x = self.conv_pre(x)
        each = len(RES_KERNELS)
        for stage, up in enumerate(self.ups):
            x = up[0](x)
            x = sum(block(x, taps) for block in self.resblocks[each * stage : each * (stage + 1)]) / each
        return self.conv_post(self.activation_post(x, taps)).clamp_(-1, 1)


class AudioDecoder(nn.Module):
    """The decoder half of the H3 audio VAE.

    Args:
        latent: channels between the two halves of the VAE (2048 in the released model).
        width: channels after the first convolution (1024 in the released model), halved by each of seven stages.
    """

    def __init__(self, latent: int, width: int):
        super().__init__()
        self.dec_in_proj = nn.Conv1d(CHANNELS, latent, 1)
        self.decoder = Vocoder(latent, width)
        self.register_buffer("latents_mean", torch.empty(CHANNELS))
        self.register_buffer("latents_std", torch.empty(CHANNELS))

    def forward(self, z: Tensor) -> Iterator[Tensor]:
        """Decode in equal chunks of at most 6 s, so that memory does not grow with the length.

        Args:
            z: [2, 32, n] float32 in the sampler's scale, left and right.

        Yields:
            [2, 800 * m] float32 in [-1, 1], in order, n latents in all.
        """
        z = z * self.latents_std[:, None] + self.latents_mean[:, None]
        taps, total = resampling_filter().to(z.device), z.shape[-1]
        size = -(-total // -(-total // CHUNK))
        for start in range(0, total, size):
            first, stop = max(0, start - CONTEXT), min(start + size, total)
            wave = self.decoder(self.dec_in_proj(z[..., first : stop + CONTEXT]), taps)[:, 0]
            yield wave[:, SAMPLES * (start - first) : SAMPLES * (stop - first)]
