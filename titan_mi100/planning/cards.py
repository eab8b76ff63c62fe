"""The data sheets of cards. To add one: a line in CARDS, and its clock in tests/test_model_spec.py."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True)
class Gpu:
    """One device as the system shows it (an MI250X shows two), by its data sheet.

    Attributes:
        tflops: peak dense rates by compute dtype; float32 is true fp32, not tf32.
        memory_gib: memory of the device, in GiB.
        link_gbs: GB/s to its neighbour in a node and direction.
        host_gbs: GB/s to the host's memory and back.
        per_node: devices of a node.
        node_gbs: its share of what a node sends to others, GB/s and direction.
    """

    name: str
    tflops: Mapping[str, float]
    memory_gib: float
    link_gbs: float
    host_gbs: float = 32
    per_node: int = 8
    node_gbs: float = 12.5


class Card(NamedTuple):
    """A data sheet with what finds it: names vary ("AMD Instinct MI100", empty, "Arcturus GL-XL"), these do not."""

    arch: str  # gcnArchName without its features, or "sm" + compute capability
    units: int  # compute units or SMs
    key: str  # what people call it, for --device
    gpu: Gpu


def _card(
    arch: str, units: int, key: str, name: str, rates: tuple[float, ...], memory: float, link: float, host: float = 32,
    node: float = 12.5,
) -> Card:  # fmt: skip
    """Args:
    rates: TFLOP/s in float16, bfloat16 and float32; 0: the card has none.
    """
    tflops = {dtype: rate for dtype, rate in zip(("float16", "bfloat16", "float32"), rates, strict=True) if rate}
    return Card(arch, units, key, Gpu(name, tflops, memory, link, host, node_gbs=node))


# Source: the vendors' data sheets and architecture papers, 2026-11. Rates are those of the matrix cores, without
# sparsity and with sums in fp32, of which GeForce has half the rate of the other cards of its chip. float32 is the
# matrix rate on CDNA. Several cards of one chip: the first is meant where the memory is not known.
# Links, GB/s in one direction. PCIe 4.0 x16: 32, 5.0: 64 (GeForce has no direct way to its neighbour: at most that).
# Frontier (OLCF's user guide): 8 GCDs a node; between GCDs of two cards 50 to 100 over xGMI (within a card 200; a ring
# is as fast as its slowest link), to the host 36, four Slingshot NICs of 25 a node. NVLink, half of the data sheets'
# sum of both directions: A100 300, H100 450, B200 900. InfiniBand as in the DGX data sheets: A100 eight HDR ports of 25
# a node, H100 eight NDR ports of 50; MI300X, MI355X: eight ports of 50 in the vendors' platforms. Cards without a node
# of their own: 8 cards and one HDR port for two of them are assumed, as for a device of a user who says nothing else.
CARDS = (
    _card("gfx906", 60, "mi50", "MI50", (26.5, 0, 13.25), 32, 32),
    _card("gfx908", 120, "mi100", "MI100", (184.6, 92.3, 46.1), 32, 32),
    _card("gfx90a", 104, "mi210", "MI210 or half an MI250", (181.0, 181.0, 45.3), 64, 50),
    _card("gfx90a", 110, "mi250x", "half an MI250X", (191.5, 191.5, 47.9), 64, 50, 36),
    _card("gfx942", 304, "mi300x", "MI300X", (1307.4, 1307.4, 163.4), 192, 64, 64, 50),
    _card("gfx950", 256, "mi355x", "MI355X", (2516.6, 2516.6, 157.3), 288, 76.8, 64, 50),
    _card("gfx1100", 96, "7900xtx", "RX 7900 XTX", (122.9, 122.9, 61.4), 24, 32),
    _card("gfx1100", 84, "7900xt", "RX 7900 XT", (103.2, 103.2, 51.6), 20, 32),
    _card("gfx1100", 96, "w7900", "Radeon PRO W7900", (122.6, 122.6, 61.3), 48, 32),
    _card("gfx1151", 40, "strix-halo", "Strix Halo", (59.4, 59.4, 29.7), 96, 32),
    _card("gfx1201", 64, "9070xt", "RX 9070 XT", (194.6, 194.6, 48.7), 16, 64, 64),
    _card("gfx1201", 64, "r9700", "Radeon AI PRO R9700", (191.4, 191.4, 47.8), 32, 64, 64),
    _card("sm80", 108, "a100", "A100", (312.0, 312.0, 19.5), 80, 300, 32, 25),
    _card("sm80", 108, "a100-40gb", "A100 40 GB", (312.0, 312.0, 19.5), 40, 300, 32, 25),
    _card("sm86", 72, "a10", "A10", (125.0, 125.0, 31.2), 24, 32),
    _card("sm86", 82, "3090", "RTX 3090", (71.2, 71.2, 35.6), 24, 32),
    _card("sm89", 58, "l4", "L4", (121.2, 121.2, 30.3), 24, 32),
    _card("sm89", 128, "4090", "RTX 4090", (165.2, 165.2, 82.6), 24, 32),
    _card("sm89", 142, "l40s", "L40S or RTX 6000 Ada", (362.1, 362.1, 91.6), 48, 32),
    _card("sm90", 132, "h100", "H100 SXM", (989.4, 989.4, 66.9), 80, 450, 64, 50),
    _card("sm90", 132, "h200", "H200", (989.4, 989.4, 66.9), 141, 450, 64, 50),
    _card("sm90", 132, "h100-nvl", "H100 NVL", (835.5, 835.5, 60.3), 94, 300, 64),
    _card("sm90", 132, "gh200", "GH200", (989.4, 989.4, 66.9), 96, 450, 450, 50),
    _card("sm90", 114, "h100-pcie", "H100 PCIe", (756.0, 756.0, 51.2), 80, 64, 64, 50),
    _card("sm100", 148, "b200", "B200", (2250.0, 2250.0, 75.0), 180, 900, 64, 50),
    _card("sm120", 170, "5090", "RTX 5090", (209.5, 209.5, 104.8), 32, 64, 64),
    _card("sm120", 188, "rtx-pro-6000", "RTX PRO 6000 Blackwell", (503.8, 503.8, 126.0), 96, 64, 64),
)
DEVICES: Mapping[str, Gpu] = {card.key: card.gpu for card in CARDS}
