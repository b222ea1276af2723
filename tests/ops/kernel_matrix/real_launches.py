"""All launches of real shapes on one family of GPUs: models that train and serve, ops at full size.

A kernel that none of them launches is taken from the small cases of its op.
"""

from dataclasses import dataclass

from kernel_matrix.gpu_families import GpuFamily
from kernel_matrix.launch_recorder import Launch, LaunchRecorder
from kernel_matrix.op_launches import launch_op_cases, launch_softcap_block


@dataclass(frozen=True)
class RealLaunches:
    """Distinct launches, and what the GPU refuses before it launches anything."""

    launches: list[Launch]
    refused: list[str]


def record_launches(family: GpuFamily, cases: str | None = None) -> RealLaunches:
    """Record the launches of this process, which pretends to have such a GPU.

    `cases`: a pattern of full-size cases of ops, of which only the launches are recorded.
    """
    recorder, refused = LaunchRecorder(family.target), []
    with recorder.recording():
        if cases is None:
            from kernel_matrix.serving_launches import launch_serving
            from kernel_matrix.training_launches import launch_training

            refused = launch_training(recorder) + launch_serving(recorder)
            launch_softcap_block(recorder)
        by_models = len(recorder.launches)
        launch_op_cases(recorder, True, cases or "")
        at_full_size = len(recorder.launches)
        if cases is None:
            launch_op_cases(recorder, False)
    launches = recorder.launches
    kernels = {launch.kernel for launch in launches[:at_full_size]}
    of_ops = launches[by_models:at_full_size]
    of_ops += [launch for launch in launches[at_full_size:] if launch.kernel not in kernels]
    return RealLaunches(launches[:by_models] + of_ops, refused)
