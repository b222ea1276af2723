"""GPUs without HBM: GeForce, RTX PRO, L4, L40S, A10G. They share PCIe only, a pair of RTX 3090 also NVLink.

Peaks of GeForce are those with accumulation in fp32, as GEMMs here accumulate; fp16 accumulation would double them.
"""

from llmb.perfmodel.gpu_types.gpu_row import GB, GIB, Fabric, Gpu, peaks

_BLACKWELL = "NVIDIA RTX Blackwell architecture white paper, dense, fp32 accumulation; memory as CUDA reports it"
_PRO = "NVIDIA RTX PRO 6000 Blackwell data sheet, half of its peaks with sparsity; memory as CUDA reports it"
_PRO_SERVER = (
    "NVIDIA RTX PRO 6000 Blackwell Server Edition data sheet; peaks: half of the whole PFLOP/s with sparsity on its "
    "product page; memory as CUDA reports it"
)

GRAPHICS = (
    Gpu(key="rtx-pro-6000", title="NVIDIA RTX PRO 6000 Blackwell Workstation Edition",
        peak_flops=peaks(503.8, 1007.6, 2015.2, fp32=125), memory_bytes=94.9 * GIB, memory_bandwidth=1792 * GB,
        link_bandwidth=64 * GB, host_bandwidth=64 * GB,
        fabric=Fabric(family="blackwell-graphics", sms=188, watts=600, link_domain=1),
        source=_PRO, name_words=("rtx", "pro", "6000", "blackwell"), more_words=("workstation", "edition")),
    Gpu(key="rtx-pro-6000-server", title="NVIDIA RTX PRO 6000 Blackwell Server Edition",
        peak_flops=peaks(500, 1000, 2000, fp32=120), memory_bytes=94.9 * GIB, memory_bandwidth=1597 * GB,
        link_bandwidth=64 * GB, host_bandwidth=64 * GB,
        fabric=Fabric(family="blackwell-graphics", sms=188, watts=600, link_domain=1),
        source=_PRO_SERVER, name_words=("rtx", "pro", "6000", "blackwell", "server"), more_words=("edition",)),
    Gpu(key="rtx-5090", title="NVIDIA GeForce RTX 5090", peak_flops=peaks(209.5, 419, 1676, fp32=104.8),
        memory_bytes=31.3 * GIB, memory_bandwidth=1792 * GB, link_bandwidth=64 * GB, host_bandwidth=64 * GB,
        fabric=Fabric(family="blackwell-graphics", sms=170, watts=575, link_domain=1),
        source=_BLACKWELL, name_words=("rtx", "5090")),
    Gpu(key="rtx-4090", title="NVIDIA GeForce RTX 4090", peak_flops=peaks(165.2, 330.3, fp32=82.6),
        memory_bytes=23.6 * GIB, memory_bandwidth=1008 * GB, link_bandwidth=32 * GB, host_bandwidth=32 * GB,
        fabric=Fabric(family="ada", sms=128, watts=450, link_domain=1),
        source="NVIDIA Ada GPU architecture white paper, dense, fp32 accumulation; memory as CUDA reports it",
        name_words=("rtx", "4090")),
    Gpu(key="rtx-3090", title="NVIDIA GeForce RTX 3090", peak_flops=peaks(71, fp32=35.6), memory_bytes=23.6 * GIB,
        memory_bandwidth=936 * GB, link_bandwidth=56.25 * GB, host_bandwidth=32 * GB,  # with an NVLink bridge
        fabric=Fabric(family="ampere-graphics", sms=82, watts=350, link_domain=2),
        source="NVIDIA GA102 architecture white paper, dense, fp32 accumulation; memory as CUDA reports it",
        name_words=("rtx", "3090")),
    Gpu(key="l40s", title="NVIDIA L40S", peak_flops=peaks(362, 733, fp32=91.6), memory_bytes=44.4 * GIB,
        memory_bandwidth=864 * GB, link_bandwidth=32 * GB, host_bandwidth=32 * GB,
        fabric=Fabric(family="ada", sms=142, watts=350, link_domain=1),
        source="NVIDIA L40S data sheet, dense; memory as CUDA reports it", name_words=("l40s",)),
    Gpu(key="l4", title="NVIDIA L4", peak_flops=peaks(121, 242.5, fp32=30.3), memory_bytes=22.0 * GIB,
        memory_bandwidth=300 * GB, link_bandwidth=32 * GB, host_bandwidth=32 * GB,
        fabric=Fabric(family="ada", sms=58, watts=72, link_domain=1),
        source="NVIDIA L4 data sheet, half of its peaks with sparsity; memory as CUDA reports it", name_words=("l4",)),
    Gpu(key="a10g", title="NVIDIA A10G", peak_flops=peaks(70, fp32=35), memory_bytes=22.0 * GIB,
        memory_bandwidth=600 * GB, link_bandwidth=32 * GB, host_bandwidth=32 * GB,
        fabric=Fabric(family="ampere-graphics", sms=80, watts=300, link_domain=1),
        source="NVIDIA A10G data sheet, dense; SMs and memory as CUDA reports them", name_words=("a10g",)),
)  # fmt: skip
