# SPDX-License-Identifier: Apache-2.0
"""Known failure messages of vLLM and Docker, each with its cause and remedy."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial


@dataclass(frozen=True)
class Explanation:
    cause: str
    """Key of the cause, such as `oom_gpu`."""
    reason: str
    remedy: str
    heals: bool = True
    """Whether another attempt can succeed without an operator's action."""

    def sentence(self) -> str:
        return f"{self.reason[:1].upper()}{self.reason[1:]}. {self.remedy}."


Words = Callable[[Mapping[str, str]], str]


@dataclass(frozen=True)
class Signature:
    """A log line that reveals a cause. `reason` and `remedy` may contain names of the pattern's groups, as {name}."""

    cause: str
    """Key of the cause."""
    pattern: str
    reason: str
    remedy: str | Words
    heals: bool = True
    """Whether another attempt can succeed without an operator's action."""
    raised_in: str | None = None
    """For an exception that does not name its file: pattern of the source file, in the traceback above the line, whose
    code met the exception.
    """

    @property
    def only_while_starting(self) -> bool:
        """Whether the signature counts only during startup.

        Settings and files are checked once. Later the same words come from requests, such as a client's broken JSON.
        """
        return not self.heals and self.cause not in _ALSO_WHILE_SERVING


# Causes that another attempt does not cure, but that may show up only with a request.
_ALSO_WHILE_SERVING = frozenset({"compiler_missing", "shm_too_small", "driver_mismatch", "read_only", "cache_damaged"})


# Source files that tell whose file contained broken JSON, which the exception does not say.
_COMPILERS = r"/(?:triton|torch/_(?:inductor|functorch|dynamo)|vllm/compilation|flashinfer)/"
_MODEL_READERS = r"/(?:transformers|tokenizers|mistral_common|vllm/(?:transformers_utils|tokenizers|model_executor))/"
_EMPTY_THE_CACHE = (
    "empty the engine's compile cache, which the next start fills again: `find /data/vllm/cache/<engine> -mindepth 2 "
    "-delete` (below vllm_engine_cache_directory), then start the unit"
)


def _choose_kv_remedy(groups: Mapping[str, str]) -> str:
    longest = groups.get("estimated")
    if longest:
        return f"Set max_model_len of the engine to {longest} or less, or give it more KV cache memory"
    return "Lower max_model_len, or give the engine more KV cache memory"


_final = partial(Signature, heals=False)
"""A signature whose cause stays until an operator acts."""

ENGINE_SIGNATURES: tuple[Signature, ...] = (
    # -- memory, in the order in which vLLM can fail; the messages on the KV cache are the most exact and come first
    _final(
        "kv_below_max_model_len",
        r"To serve at least one request with the model(?:'?s|s's) max seq len \((?P<length>\d+)\)"
        r"(?:.{0,300}?\((?P<needed>[\d.]+) Gi?B KV)?(?:.{0,300}?memory \((?P<free>[\d.]+) Gi?B\))?"
        r"(?:.{0,300}?estimated maximum model length is (?P<estimated>\d+))?",
        "the KV cache cannot hold one request of max_model_len {length} ({needed} GiB needed, {free} GiB left)",
        _choose_kv_remedy,
    ),
    _final(
        "no_kv",
        r"No available memory for the cache blocks",
        "after weights and activations no GPU memory is left for the KV cache",
        "Lower max_num_seqs or max_model_len, raise tensor_parallel_size, or choose a smaller precision",
    ),
    Signature(
        "not_free",
        r"Free memory on device (?:\S+ )?\((?P<free>[\d.]+)/(?P<total>[\d.]+) GiB\).{0,300}?less than desired GPU "
        r"memory utilization \((?P<share>[\d.]+), (?P<wanted>[\d.]+) GiB\)",
        "the GPU has {free} of {total} GiB free, {wanted} GiB are wanted (gpu_memory_utilization {share})",
        "Something else holds memory there: `vllm-edge status` and `nvidia-smi` name it; an engine that has just "
        "stopped gives it back within seconds",
    ),
    _final(
        "oom_warmup",
        r"CUDA out of memory occurred when warming up sampler with (?P<requests>\d+) dummy requests",
        "GPU memory ran out while warming up the sampler with {requests} requests",
        "Lower max_num_seqs of the engine (8 is enough for agents that work one after another)",
    ),
    Signature(
        "oom_weights",
        r"Failed to load model - not enough GPU memory",
        "the weights do not fit into GPU memory",
        "Raise tensor_parallel_size, choose a smaller precision, and look with `nvidia-smi` whether something else "
        "holds memory",
    ),
    Signature(
        "oom_gpu",
        r"(?:torch\.(?:cuda\.)?OutOfMemoryError|CUDA out of memory)"
        r"(?:.{0,300}?Tried to allocate (?P<size>[\d.]+ \w+))?",
        "GPU memory ran out (tried to allocate {size})",
        "Lower max_num_seqs or gpu_memory_utilization; look with `nvidia-smi` whether something else holds memory",
    ),
    Signature(
        "not_free_cpu",
        r"Available memory on node .* is less than desired CPU memory utilization",
        "less memory of the machine is free than the engine reserves for its KV cache",
        "Set kv_cache_memory_bytes of the engine, or free memory on the host",
    ),
    # -- driver
    _final(
        "driver_mismatch",
        r"[Dd]river/library version mismatch|NVMLError_LibRmVersionMismatch",
        "the loaded kernel module and the driver's libraries have different versions (upgraded, not rebooted)",
        "Reboot the host, or run the host stage with `-e allow_reboot=true`",
    ),
    Signature(
        "gpu_lost",
        r"GPU is lost|NVMLError_GpuIsLost|has fallen off the bus",
        "a GPU fell off the bus",
        "Look for Xid lines in `journalctl -k`; a lost GPU needs a reboot, or has to be replaced",
    ),
    Signature(
        "nvml",
        r"Failed to initialize NVML: (?P<text>[\w /]+)|NVMLError_(?P<text2>\w+)",
        "NVML does not open inside the container ({text}{text2})",
        "The container lost its devices (`systemctl daemon-reload` does this without CDI) or the driver is gone: "
        "compare `nvidia-smi` on the host; a new container restores lost devices",
    ),
    # torch's texts are in c10/cuda/CUDAFunctions.cpp, the others in CUDA's cudaGetErrorString: 35, 803, 804 and 999.
    _final(
        "driver_too_old",
        r"CUDA driver version is insufficient|NVIDIA driver on your system is too old",
        "the image's CUDA is newer than the host's driver, and its compat libraries were not used (error 35)",
        "Upgrade the driver branch (`playbooks/driver_upgrade.yml`), or choose an older engine version from the "
        "compatibility matrix",
    ),
    _final(
        "cuda_compat_mismatch",
        r"Error 803\b|system has unsupported display driver",
        "the CUDA library in the container does not go together with the host's kernel module (error 803)",
        "If `nvidia-smi` fails on the host, too, reboot it: the driver was changed under the loaded module. Otherwise "
        "the image's compat library took the place of the host's: remove LD_LIBRARY_PATH and "
        "VLLM_ENABLE_CUDA_COMPATIBILITY from extra_env of the engine, and run `systemctl restart "
        "nvidia-cdi-refresh.service`. If neither is set, the library does not support the driver: upgrade its branch "
        "(`playbooks/driver_upgrade.yml`)",
    ),
    _final(
        "no_forward_compatibility",
        r"Error 804\b|forward compatibility was attempted on non supported HW",
        "the image's CUDA is newer than the host's driver, and this card has no forward compatibility, which only "
        "data-center cards have (error 804)",
        "Upgrade the driver branch: `nvidia-smi` shows the CUDA version that it has. VLLM_ENABLE_CUDA_COMPATIBILITY "
        "does not help here",
    ),
    Signature(
        "cuda_unknown",
        r"CUDA unknown error|CUDA_ERROR_UNKNOWN|cudaErrorUnknown|CUDA error: unknown error",
        "CUDA could not be initialized although the driver is loaded (error 999), most often because the container "
        "lacks /dev/nvidia-uvm",
        "Look at `ls -l /dev/nvidia-uvm` and `grep uvm /var/run/cdi/nvidia.yaml` on the host. `nvidia-ctk system "
        "create-device-nodes --control-devices --load-kernel-modules` makes the node, and then `systemctl restart "
        "nvidia-cdi-refresh.service` lists it. If both are there, look for Xid lines in `journalctl -k`",
    ),
    Signature(
        "no_gpu",
        r"No CUDA GPUs are available|Failed to infer device type|libcuda\.so\.1: cannot open shared object",
        "the container sees no GPU",
        "Check `--device=nvidia.com/gpu=...` in docker-create and `nvidia-ctk cdi list`",
    ),
    _final(
        "too_few_gpus",
        r"World size \((?P<world>\d+)\) is larger than the number of available GPUs \((?P<gpus>\d+)\)|"
        r"local_world_size \((?P<world2>\d+)\) must be less than or equal to the number of visible devices "
        r"\((?P<gpus2>\d+)\)",
        "tensor_parallel_size asks for {world}{world2} GPUs, the container has {gpus}{gpus2}",
        "Give the engine as many gpus as its tensor_parallel_size",
    ),
    Signature(
        "gpu_error",
        r"CUDA error: (?P<text>an illegal memory access|device-side assert|uncorrectable ECC error|"
        r"unspecified launch failure)",
        "the GPU reported an error: {text}",
        "Look for Xid lines in `journalctl -k`; if it repeats on one GPU, have that GPU tested",
    ),
    # -- shared memory, before NCCL, which runs out of it, and before the generic "No space left"
    _final(
        "shm_too_small",
        r"unable to (?:write to|allocate shared memory|mmap).{0,300}(?:torch_|/dev/shm|shared memory)|"
        r"Bus error|creating shared memory segment \S*/dev/shm|"
        r"(?:/dev/shm|psm_\w{1,100}).{0,300}No space left on device|"
        r"insufficient shared memory|No space left on device.{0,300}/dev/shm",
        "/dev/shm of the container is too small",
        "Raise vllm_engine_shm_size (2g for one GPU, 4g for four)",
    ),
    _final(
        "shm_too_small",
        r"died (?:unexpectedly )?(?:\(exit code: -7\)|with exit code -7)",
        "a worker got SIGBUS: /dev/shm of the container is too small",
        "Raise vllm_engine_shm_size (2g for one GPU, 4g for four)",
    ),
    Signature(
        "nccl",
        r"(?P<text>nccl(?:UnhandledCuda|System|Internal|Remote)Error|"
        r"(?<=NCCL error: )(?:unhandled|internal|remote)[\w ]* error)",
        "the GPUs of the engine cannot talk to each other ({text})",
        "Set NCCL_DEBUG=INFO for the engine; on hosts without NVLink try NCCL_P2P_DISABLE=1 and "
        "disable_custom_all_reduce",
    ),
    # -- arguments and files
    _final(
        "unknown_argument",
        r"error: unrecognized arguments?: (?P<text>.+)",
        "this vLLM does not know the argument {text}",
        "Correct extra_args of the engine, or choose a version that knows it (`vllm serve --help` in the image)",
    ),
    _final(
        "bad_argument",
        r"error: argument (?P<name>[-\w/]+): (?P<text>.+)",
        "vLLM refuses the argument {name}: {text}",
        "Correct the engine's settings",
    ),
    _final(
        "max_model_len_too_long",
        r"User-specified max_model_len \((?P<length>\d+)\) is greater than the derived max_model_len"
        r"(?:.{0,300}?=(?P<most>\d+))?",
        "max_model_len {length} is longer than the model's own limit {most}",
        "Set max_model_len of the engine to the model's limit or less",
    ),
    _final(
        "bad_shape",
        r"(?P<text>Total number of attention heads \(\d+\) must be divisible by tensor parallel size \(\d+\))",
        "{text}",
        "Choose a tensor_parallel_size that divides it",
    ),
    _final(
        "weights_damaged",
        r"(?P<text>SafetensorError\S*.*|HeaderTooLarge|HeaderTooSmall|InvalidHeader\w*|MetadataIncompleteBuffer|"
        r"Error while deserializing header.*)",
        "a weights file is damaged or cut short: {text}",
        "Run the weights stage with a full verification: it fetches what does not match its hash again",
    ),
    _final(
        "hub_offline",
        r"OfflineModeIsEnabled|LocalEntryNotFoundError|outgoing traffic has been disabled|offline mode is enabled",
        "vLLM asked the model hub for a file, but engines run offline",
        "Give the engine the directory of its weights, complete with tokenizer and configuration: run the weights "
        "stage",
    ),
    _final(
        "weights_missing",
        r"Cannot find any model weights|No such file or directory: ['\"]?(?P<path>/models/[^'\"\s]+)|"
        r"Invalid repository ID or local directory specified: '?(?P<path2>[^'\s]+)'?|"
        r"(?P<path3>(?<!\S)\S{1,300}) is not a local folder and is not a valid model identifier|"
        r"(?P<path4>(?<!\S)/models/\S{1,300}) does not appear to have (?:a file|files) named",
        "files of the model are missing: {path}{path2}{path3}{path4}",
        "Run the weights stage; see that the directory is mounted and readable for the user vllm-edge",
    ),
    _final(
        "transformers_too_old",
        r"model type `(?P<type>[^`]+)` but Transformers does not recognize this architecture",
        "the image's transformers does not know the architecture {type}",
        "Run the image stage with a transformers requirement that knows it (Gemma 4: 5.5.0 or newer)",
    ),
    _final(
        "config_damaged",
        r"Unrecognized model in|is not a valid JSON file|Can't load tokenizer|"
        r"Couldn't instantiate the backend tokenizer|Error parsing .*config\.json",
        "a configuration or tokenizer file of the model cannot be read",
        "Verify the weights directory in full and fetch it again",
    ),
    _final(
        "config_damaged",
        r"JSONDecodeError",
        "a configuration, tokenizer or index file of the model is damaged or cut short",
        "Verify the weights directory in full and fetch it again",
        raised_in=_MODEL_READERS,
    ),
    _final(
        "cache_damaged",
        r"JSONDecodeError",
        "a file of the compile cache is damaged or cut short, as a power cut leaves one that is being written",
        f"{_EMPTY_THE_CACHE[:1].upper()}{_EMPTY_THE_CACHE[1:]}",
        raised_in=_COMPILERS,
    ),
    Signature(
        "cache_damaged",
        r"No such file or directory: '(?P<path>/cache/[^']+|"
        r"/[^']*(?:\.triton/cache|torch_compile_cache|torchinductor_\w+)/[^']+)'",
        "a file of the compile cache was removed while it was in use: {path}",
        f"Another start creates it again; if the error comes back, {_EMPTY_THE_CACHE}",
    ),
    _final(
        "compiler_missing",
        r"Failed to find C compiler|No working C\+\+ compiler found|"
        r"No such file or directory: '(?:g\+\+|gcc|cc|c\+\+)'|fatal error: Python\.h",
        "the engine needed a C compiler, or Python's headers, to build a kernel",
        "Add g++ and the Python headers to the image",
    ),
    _final(
        "not_permitted",
        r"PermissionError: \[Errno 13\] Permission denied: '(?P<path>/(?:models|cache|chat-template)\b[^']*)'",
        "the engine's user may not use {path}",
        "Weights belong to root:vllm-edge with 0640/0750, caches to vllm-edge: run the weights and engines stages",
    ),
    _final(
        "read_only",
        r"OSError: \[Errno 30\] Read-only file system: '(?P<path>[^']+)'",
        "the engine wants to write {path}, and its root is read-only",
        "Mount a cache or a tmpfs there in docker-create",
    ),
    Signature(
        "disk_full",
        r"No space left on device",
        "a file system the engine writes to is full",
        "Look at `df -h /data /tmp` and at vllm_engine_shm_size",
    ),
)
"""Messages in vLLM's log. The first one that matches wins, so specific ones precede general ones."""


# Docker's messages when it refuses to create or start a container; the engine's log contains none of them.
DOCKER_SIGNATURES: tuple[Signature, ...] = (
    Signature(
        "cdi_unresolvable",
        r"unresolvable CDI devices? (?P<device>\S+)",
        "Docker knows no CDI device {device}",
        "The CDI specification is stale or the GPU is gone: compare `nvidia-ctk cdi list` with `nvidia-smi -L`, then "
        "`systemctl restart nvidia-cdi-refresh.service`",
    ),
    Signature(
        "cdi_disabled",
        r'could not select device driver "cdi"|error gathering device information while adding custom device '
        r'"nvidia\.com/|CDI device injection (?:is )?(?:not enabled|disabled)',
        "the Docker Engine does not resolve CDI devices",
        'Docker 25 or newer with {{"features": {{"cdi": true}}}} in /etc/docker/daemon.json is needed; '
        "run the host stage again",
    ),
    _final(
        "image_missing",
        r"No such image: (?P<image>\S+)|Unable to find image '(?P<image2>[^']+)' locally",
        "the image {image}{image2} is not on this host",
        "Run the image stage (`ansible-playbook site.yml`); units never pull",
    ),
    Signature(
        "name_taken",
        r'Conflict\. The container name "/?(?P<name>[^"]+)" is already in use',
        "a container named {name} appeared while this one was being created",
        "Look with `docker ps -a`; this name belongs to the engine",
    ),
    Signature(
        "mount_missing",
        r"bind source path does not exist: (?P<path>\S+)",
        "the directory {path}, which the engine mounts, does not exist",
        "Mount the file system that holds it, or run the weights stage; it is tried again in case the disk is late",
    ),
    _final(
        "docker_argument",
        r"^(?:docker create: )?(?P<text>unknown (?:shorthand )?flag: \S+|invalid argument .*|"
        r"invalid reference format.*)",
        "`docker create` does not understand its arguments: {text}",
        "The engines stage writes the file docker-create: correct the engine's settings and run it again",
    ),
    _final(
        "limit_refused",
        r"error setting rlimit(?:s for ready process|.{0,300}?type (?P<type>\d+))",
        "the kernel refuses a limit that docker-create asks for with --ulimit",
        "Containers have their limits from containerd, which must be allowed as much: LimitMEMLOCK=infinity in "
        "containerd.service, and in docker.service where that starts its own (see "
        "`systemctl show containerd.service docker.service --property=LimitMEMLOCK`)",
    ),
    Signature(
        "docker_out_of_space",
        r"no space left on device",
        "Docker's disk is full",
        "Free space under /var/lib/docker (`docker system df`)",
    ),
    _final(
        "entrypoint_missing",
        r'exec: "(?P<name>[^"]+)": (?:executable file not found|stat |permission denied)',
        "the image has no program {name}",
        "The image is not a vLLM image: run the image stage",
    ),
)


SIGNATURES = (*DOCKER_SIGNATURES, *ENGINE_SIGNATURES)
