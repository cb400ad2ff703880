"""Float pixels from the modules of h3spool/vae, the way decode.py puts them together."""

import torch
from torch import Tensor

from h3spool.vae import tiling, video

FRAMES = [0, 16, 17, 19, 21, 38]  # of 39: first, around the join, within and after its cross-fade, last


@torch.inference_mode()
def pixels(
    net: video.VideoDecoder, z: Tensor, seams: str = "composited", dtype: torch.dtype = torch.float32, batch: int = 2
) -> Tensor:
    """z: [1, 24, T, H, W] in the sampler's scale -> [3, F, 16H, 16W] in [0, 1]."""
    z = z[0]

    def raw(index: int) -> Tensor:
        tiles = tiling.cut(net.denormalise(tiling.clip(z, index)))
        return tiling.stitch(net(tiles, dtype, batch), *z.shape[2:], seams)

    clips = (raw(index) for index in range(tiling.clip_count(z.shape[1])))
    return torch.cat([video.finalise(piece) for piece in tiling.join_clips(clips, tiling.frame_count(z.shape[1]))], 1)


def latent(*size: int, seed: int = 5) -> Tensor:
    """A random video latent [1, 24, T, H, W] in the sampler's scale."""
    return torch.randn(1, 24, *size, generator=torch.Generator().manual_seed(seed))
