"""GPUs of data centers with NVLink: Ampere A100, Hopper, Blackwell; AMD's MI300X as data."""

from llmb.perfmodel.gpu_types.gpu_row import GB, GIB, Fabric, Gpu, peaks

# The nominal peaks of GB200 and GB300 are higher than those of B200 and B300 by their boost clock, which no long GEMM
# sustains on either; power limits make the difference. MLPerf Training v5.1, Llama 3.1 8B on 8 GPUs, minutes: B200
# 84.4, GB200 79.3, B300 75.8, GB300 67.4.
GB_CLOCK = 2450 / 2250
B200_CLOCK, B300_CLOCK = GB_CLOCK * 79.3 / 84.4, GB_CLOCK * 67.4 / 75.8
# Of the H20's peak a GEMM reaches 142 of 148 TFLOP/s, as 78 SMs stay below its power limit; 3.5 % more without lost
# waves and pipeline fill, where Hopper's fitted fraction is 0.758.
H20_CLOCK = 1.035 * 142 / 148 / 0.758
# Fabrics: NVIDIA data sheets of A100, H100, H200, DGX B200, DGX B300, GB200 NVL72, GB300 NVL72.
_RECIPES = "NVIDIA dgxc-benchmarking, recipe READMEs (dense peaks); memory as CUDA reports it (B300, GB300: nominal)"
_A100 = "NVIDIA A100 data sheet, dense; memory as CUDA reports it"
_H100 = "NVIDIA H100 data sheet, half of its peaks with sparsity; memory as CUDA reports it"

# Newest first; of one chip, the variant that recipes are for last: predictors list them in reverse.
DATACENTER = (
    Gpu(key="gb300", title="NVIDIA GB300", peak_flops=peaks(2450, 4900, 14700), memory_bytes=288 * GB,
        memory_bandwidth=8000 * GB, link_bandwidth=900 * GB, host_bandwidth=450 * GB, gpus_per_node=4,
        fabric=Fabric(family="blackwell-ultra", sms=148, watts=1400, link_domain=72, network=100 * GB, grace=True),
        source=_RECIPES, name_words=("gb300",)),
    Gpu(key="gb200", title="NVIDIA GB200", peak_flops=peaks(2450, 4900, 9800), memory_bytes=184.3 * GIB,
        memory_bandwidth=8000 * GB, link_bandwidth=900 * GB, host_bandwidth=450 * GB, gpus_per_node=4,
        fabric=Fabric(family="blackwell", sms=148, watts=1200, link_domain=72, network=50 * GB, grace=True),
        source=_RECIPES, name_words=("gb200",)),
    Gpu(key="b300", title="NVIDIA B300", peak_flops=peaks(2250, 4500, 13500), memory_bytes=288 * GB,
        memory_bandwidth=8000 * GB, link_bandwidth=900 * GB, host_bandwidth=64 * GB,
        fabric=Fabric(family="blackwell-ultra", sms=148, watts=1100, link_domain=8, network=100 * GB,
                      clock=B300_CLOCK),
        source=_RECIPES, name_words=("b300",)),
    Gpu(key="b200", title="NVIDIA B200", peak_flops=peaks(2250, 4500, 9000), memory_bytes=178.3 * GIB,
        memory_bandwidth=8000 * GB, link_bandwidth=900 * GB, host_bandwidth=64 * GB,
        fabric=Fabric(family="blackwell", sms=148, watts=1000, link_domain=8, network=50 * GB, clock=B200_CLOCK),
        source=_RECIPES, name_words=("b200",)),
    Gpu(key="gh200", title="NVIDIA GH200 96 GB", peak_flops=peaks(989, 1979, fp32=67), memory_bytes=94.5 * GIB,
        memory_bandwidth=4000 * GB, link_bandwidth=450 * GB, host_bandwidth=450 * GB, gpus_per_node=1,
        fabric=Fabric(family="hopper", sms=132, watts=1000, link_domain=1, grace=True),  # watts of the whole module
        source="NVIDIA GH200 data sheet, half of its peaks with sparsity; nominally 96 GB of HBM3",
        name_words=("gh200",), more_words=("480gb",)),  # 480 GB are the LPDDR5X of its CPU
    Gpu(key="h200", title="NVIDIA H200 SXM", peak_flops=peaks(989, 1979, fp32=67), memory_bytes=139 * GIB,
        memory_bandwidth=4800 * GB, link_bandwidth=450 * GB, host_bandwidth=64 * GB,
        fabric=Fabric(family="hopper", sms=132, watts=700, link_domain=8, network=50 * GB),
        source="NVIDIA H200 data sheet, dense; driver-reported memory (nominally 141 GB)", name_words=("h200",)),
    Gpu(key="h20", title="NVIDIA H20", peak_flops=peaks(148, 296, fp32=44), memory_bytes=95.1 * GIB,
        memory_bandwidth=4000 * GB, link_bandwidth=450 * GB, host_bandwidth=64 * GB,
        fabric=Fabric(family="hopper", sms=78, watts=400, link_domain=8, clock=H20_CLOCK),
        source="NVIDIA H20 product brief, as its resellers print it; SMs and memory as CUDA reports them",
        name_words=("h20",)),
    Gpu(key="h100-pcie", title="NVIDIA H100 PCIe", peak_flops=peaks(756, 1513, fp32=51), memory_bytes=79.2 * GIB,
        memory_bandwidth=2000 * GB, link_bandwidth=300 * GB, host_bandwidth=64 * GB,
        fabric=Fabric(family="hopper", sms=114, watts=350, link_domain=2), source=_H100, name_words=("h100", "pcie")),
    Gpu(key="h100-nvl", title="NVIDIA H100 NVL", peak_flops=peaks(835.5, 1671, fp32=60), memory_bytes=93.1 * GIB,
        memory_bandwidth=3900 * GB, link_bandwidth=300 * GB, host_bandwidth=64 * GB,
        fabric=Fabric(family="hopper", sms=132, watts=400, link_domain=2), source=_H100, name_words=("h100", "nvl")),
    Gpu(key="h100", title="NVIDIA H100 SXM", peak_flops=peaks(989, 1979, fp32=67), memory_bytes=79.1 * GIB,
        memory_bandwidth=3350 * GB, link_bandwidth=450 * GB, host_bandwidth=64 * GB,
        fabric=Fabric(family="hopper", sms=132, watts=700, link_domain=8, network=50 * GB),
        source=_RECIPES, name_words=("h100",)),
    Gpu(key="a100-pcie-40gb", title="NVIDIA A100 PCIe 40 GB", peak_flops=peaks(312, fp32=19.5),
        memory_bytes=39.4 * GIB, memory_bandwidth=1555 * GB, link_bandwidth=300 * GB, host_bandwidth=32 * GB,
        fabric=Fabric(family="ampere", sms=108, watts=250, link_domain=2), source=_A100, name_words=("a100", "pcie")),
    Gpu(key="a100-pcie", title="NVIDIA A100 PCIe 80 GB", peak_flops=peaks(312, fp32=19.5), memory_bytes=79.1 * GIB,
        memory_bandwidth=1935 * GB, link_bandwidth=300 * GB, host_bandwidth=32 * GB,
        fabric=Fabric(family="ampere", sms=108, watts=300, link_domain=2), source=_A100, name_words=("a100", "pcie")),
    Gpu(key="a100-40gb", title="NVIDIA A100 SXM 40 GB", peak_flops=peaks(312, fp32=19.5), memory_bytes=39.4 * GIB,
        memory_bandwidth=1555 * GB, link_bandwidth=300 * GB, host_bandwidth=32 * GB,
        fabric=Fabric(family="ampere", sms=108, watts=400, link_domain=8, network=25 * GB),
        source=_A100, name_words=("a100",)),
    Gpu(key="a100", title="NVIDIA A100 SXM 80 GB", peak_flops=peaks(312, fp32=19.5), memory_bytes=79.1 * GIB,
        memory_bandwidth=2039 * GB, link_bandwidth=300 * GB, host_bandwidth=32 * GB,
        fabric=Fabric(family="ampere", sms=108, watts=400, link_domain=8, network=25 * GB),
        source="NVIDIA A100 data sheet, dense", name_words=("a100",)),
    Gpu(key="mi300x", title="AMD Instinct MI300X", peak_flops=peaks(1307.4, 2614.9, fp32=163.4), memory_bytes=192 * GB,
        memory_bandwidth=5300 * GB, link_bandwidth=448 * GB, host_bandwidth=64 * GB,  # 7 links of 64 GB/s
        fabric=Fabric(family="cdna3", sms=304, watts=750, link_domain=8),  # compute units
        source="AMD Instinct MI300X data sheet, dense", name_words=("mi300x",), more_words=("amd", "instinct", "oam")),
)  # fmt: skip
