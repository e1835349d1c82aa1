# SPDX-License-Identifier: Apache-2.0
"""Known messages of vLLM and Docker, each with its cause and remedy, as three tables.

A row begins with `final` (the cause stays until an operator acts), `heals` (another attempt can succeed) or `warns` (no
failure) and the key of the cause. Then come lines with a mark: `/` an alternative of the pattern, `+` more of that
alternative, `@` where an exception was met, `=` the reason, `>` the remedy, or `#` the number of a CUDA error that has
both (gpu/cuda.py). Reason and remedy may have names of the pattern's groups, as {name}. The first row that matches
wins.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from ..gpu.cuda import ERRORS


@dataclass(frozen=True)
class Explanation:
    cause: str
    """Key of the cause, such as `oom_gpu`."""
    reason: str
    remedy: str
    heals: bool = True
    """Whether another attempt can succeed without an operator's action."""

    def sentence(self) -> str:
        first = self.reason[:1] if self.reason.startswith("vLLM") else self.reason[:1].upper()
        return f"{first}{self.reason[1:]}. {self.remedy}."


@dataclass(frozen=True)
class Signature:
    """A log line that reveals a cause. `reason` and `remedy` may contain names of the pattern's groups, as {name}."""

    cause: str
    pattern: str
    reason: str
    remedy: str
    heals: bool
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


_ALSO_WHILE_SERVING = frozenset(
    {"compiler_missing", "shm_too_small", "driver_mismatch", "read_only", "cache_damaged", "kernel_too_large"}
    | {"too_many_files", "no_threads", "no_kernel", "ptx_too_new"}
)
"""Causes that another attempt does not cure, but that may show up only with a request."""
COMPILERS = (
    r"/(?:triton|torch/_(?:inductor|functorch|dynamo)|vllm/compilation|flashinfer)/|"
    r"/(?:torch_compile_cache|torchinductor_\w+|inductor_cache)/|^/cache/(?:vllm|inductor|triton)/"
)
"""Source files of what compiles, and files that they wrote."""
_PLACES = {
    "compilers": COMPILERS,
    "models": r"/(?:transformers|tokenizers|mistral_common|vllm/(?:transformers_utils|tokenizers|model_executor))/",
}
BLAMED_ON_CACHE = frozenset({"cache_damaged", "compile_failed"})
"""Causes for which the supervisor sets the engine's compile cache aside, once."""

_ENGINE = r"""
final kv_below_max_model_len
/ To serve at least one request with the model(?:'?s|s's) max seq len \((?P<length>\d+)\)
+ (?:.{0,300}?\((?P<needed>[\d.]+) Gi?B KV)?(?:.{0,300}?memory \((?P<free>[\d.]+) Gi?B\))?
+ (?:.{0,300}?estimated maximum model length is (?P<estimated>[1-9]\d*))?
= the KV cache cannot hold one request of max_model_len {length} ({needed} GiB needed, {free} GiB left)
> Lower max_model_len of the engine (to {estimated} at most), or give it more KV cache memory
final no_kv
/ No available memory for the cache blocks
= after weights and activations no GPU memory is left for the KV cache
> Lower max_num_seqs or max_model_len, raise tensor_parallel_size, or choose a smaller precision
final mamba_blocks
/ max_num_seqs \((?P<wanted>\d+)\) exceeds available Mamba cache blocks \((?P<most>\d+)\)
= the model keeps a state for each sequence, and GPU memory has room for {most} of the {wanted} of max_num_seqs
> Set max_num_seqs of the engine to {most} or less, or raise gpu_memory_utilization
heals not_free
/ Free memory on device (?:\S+ )?\((?P<free>[\d.]+)/(?P<total>[\d.]+) GiB\).{0,300}?less than desired GPU memory
+  utilization \((?P<share>[\d.]+), (?P<wanted>[\d.]+) GiB\)
= the GPU has {free} of {total} GiB free, {wanted} GiB are wanted (gpu_memory_utilization {share})
> `vllm-edge status` and `nvidia-smi` name what holds memory; an engine that has just stopped gives it back in seconds
heals memory_moved
/ Error in memory profiling\. Initial free memory (?P<before>[\d.]+ \w+)
= another process gave GPU memory back while vLLM measured how much it needs (free at first: {before})
> Another start measures again; where engines share a GPU, start one after the other
final oom_warmup
/ CUDA out of memory occurred when warming up sampler with (?P<requests>\d+) dummy requests
= GPU memory ran out while warming up the sampler with {requests} requests
> Lower max_num_seqs of the engine (8 is enough for agents that work one after another)
heals oom_weights
/ Failed to load model - not enough GPU memory
= the weights do not fit into GPU memory
> Raise tensor_parallel_size, choose a smaller precision, and look with `nvidia-smi` whether something else holds memory
heals oom_gpu
/ (?:torch\.(?:cuda\.)?OutOfMemoryError|CUDA out of memory)(?:.{0,300}?Tried to allocate (?P<size>[\d.]+ \w+))?
= GPU memory ran out (tried to allocate {size})
> Lower max_num_seqs or gpu_memory_utilization; look with `nvidia-smi` whether something else holds memory
heals not_free_cpu
/ Available memory on node .* is less than desired CPU memory utilization
= less memory of the machine is free than the engine reserves for its KV cache
> Set kv_cache_memory_bytes of the engine, or free memory on the host
final driver_mismatch
/ [Dd]river/library version mismatch|NVMLError_LibRmVersionMismatch
= the loaded kernel module and the driver's libraries have different versions (upgraded, not rebooted)
> Reboot the host, or run the host stage with `-e allow_reboot=true`
heals gpu_lost
/ GPU is lost|NVMLError_GpuIsLost|has fallen off the bus
= a GPU fell off the bus
> Look for Xid lines in `journalctl -k`; a lost GPU needs a reboot, or has to be replaced
heals nvml
/ Failed to initialize NVML: (?P<text>[\w /]+)|NVMLError_(?P<text2>\w+)
= NVML does not open inside the container ({text}{text2})
> The container lost its devices, which a new one restores, or the driver is gone: compare `nvidia-smi` on the host
heals gpu_full
/ CUDA (?:driver )?error: out of memory
# 2
final driver_too_old
/ CUDA driver version is insufficient|NVIDIA driver on your system is too old
# 35
heals gpu_busy
/ CUDA-capable device\(s\) is/are busy or unavailable
# 46
heals no_gpu
/ No CUDA GPUs are available|no CUDA-capable device is detected|Failed to infer device type
/ libcuda\.so\.1: cannot open shared object
# 100
final too_few_gpus
/ CUDA error: invalid device ordinal
# 101
final no_kernel
/ device kernel image is invalid
# 200
final no_kernel
/ no kernel image is available for execution on the device
# 209
final no_peer_access
/ peer access is not supported between these two devices
# 217
final ptx_too_new
/ provided PTX was compiled with an unsupported toolchain
# 222
heals fabric_not_ready
/ Error 802\b|system not yet initialized
# 802
final cuda_compat_mismatch
/ Error 803\b|system has unsupported display driver
# 803
final no_forward_compatibility
/ Error 804\b|forward compatibility was attempted on non supported HW
# 804
heals cuda_unknown
/ CUDA unknown error|CUDA_ERROR_UNKNOWN|cudaErrorUnknown|CUDA error: unknown error
# 999
heals gpu_error
/ (?:CUDA error|Error \[CUDA\]): (?P<text>an illegal memory access|device-side assert|uncorrectable ECC error)
/ (?:CUDA error|Error \[CUDA\]): (?P<text2>unspecified launch failure)
= the GPU reported an error: {text}{text2}
> Look for Xid lines in `journalctl -k`; if it repeats on one GPU, have that GPU tested
heals cublas
/ CUBLAS_STATUS_(?P<text>\w+)
= cuBLAS failed ({text}), most often because no GPU memory was left beside what vLLM had reserved
> Lower gpu_memory_utilization or kv_cache_memory_bytes of the engine; `nvidia-smi` shows what else holds memory
final too_few_gpus
/ World size \((?P<world>\d+)\) is larger than the number of available GPUs \((?P<gpus>\d+)\)
/ local_world_size \((?P<world2>\d+)\) must be less than or equal to the number of visible devices
+  \((?P<gpus2>\d+)\)
= tensor_parallel_size asks for {world}{world2} GPUs, the container has {gpus}{gpus2}
> Give the engine as many gpus as its tensor_parallel_size
final cuda_in_fork
/ Cannot re-initialize CUDA in forked subprocess
= a process of vLLM was forked after CUDA had been initialized
> Set VLLM_WORKER_MULTIPROC_METHOD to spawn in extra_env of the engine
final no_bfloat16
/ Bfloat16 is only supported on GPUs with compute capability of at least (?P<least>[\d.]+\d)\. Your (?P<gpu>.+?) GPU has
+  compute capability (?P<has>\d[\d.]*\d)
= the GPU {gpu} has no bfloat16: it has compute capability {has}, and {least} is needed
> Set dtype of the engine to float16
final quantization_unsupported
/ (?:quantization method (?P<method>\S+)|Quantization scheme) is not supported for[ ',]+the current GPU\.
+  Min(?:imum)? capability: (?P<least>\d+)\.[ ',]+Current capability: (?P<has>\d+)
= the GPU cannot run the quantization {method} of the model: its compute capability is {has}, and {least} is needed
> Choose another precision of the model; `ansible-playbook playbooks/advise.yml` names what fits the GPU
final no_fp8
/ type fp8e4nv not supported in this architecture|fp8e4nv data type is not supported on CUDA arch
= the GPU has no FP8, which needs compute capability 8.9
> Choose another precision of the model, and no kv_cache_dtype of fp8
final no_moe_backend
/ No (?P<kind>\w+) MoE backend supports the deployment configuration
= this vLLM has no {kind} kernel for experts that runs on this GPU with these settings
> Choose another precision of the model, or a newer engine version (vllm_image_base)
final attention_backend
/ Selected backend (?:AttentionBackendEnum\.)?(?P<name>\w+) is not valid for this configuration\.
+  Reason: \[(?P<text>.*?)\]
/ (?P<text2>Unknown attention backend): '?(?P<name2>[\w.]+)
= the attention backend {name}{name2} cannot run this engine: {text}{text2}
> Remove --attention-backend from extra_args, or VLLM_ATTENTION_BACKEND from extra_env, so that vLLM chooses one
final no_attention_backend
/ No valid attention backend found for \w+ with
= no attention backend of this vLLM runs the model on this GPU with these settings; the line in the journal says why
> Try without kv_cache_dtype, or choose another engine version (vllm_image_base), precision or model
final kernel_too_large
/ out of resource: shared memory, Required: (?P<needed>\d+), Hardware limit: (?P<has>\d+)
= a kernel needs {needed} bytes of a multiprocessor's shared memory, and this GPU has {has}
> Choose another attention backend (--attention-backend in extra_args), another precision or another engine version
final compiler_too_old
/ ptxas fatal\s*: Value '(?P<gpu>sm_\w+)' is not defined for option 'gpu-name'
= the compiler of the image does not know this GPU ({gpu})
> Choose an engine version with a newer CUDA (vllm_image_base)
final deep_gemm
/ DeepGEMM backend is not available or outdated
= this image has no DeepGEMM, with which vLLM wanted to compute
> Set VLLM_USE_DEEP_GEMM to 0 in extra_env of the engine
final shm_too_small
/ unable to (?:write to|allocate shared memory|mmap).{0,300}(?:torch_|/dev/shm|shared memory)
/ Bus error|creating shared memory segment \S*/dev/shm|insufficient shared memory
/ (?:/dev/shm|psm_\w{1,100}).{0,300}No space left on device
/ No space left on device.{0,300}/dev/shm|died (?:unexpectedly )?(?:\(exit code: -7\)|with exit code -7)
= /dev/shm of the container is too small
> Raise vllm_engine_shm_size (2g for one GPU, 4g for four)
heals nccl_timeout
/ Watchdog caught collective operation timeout
= the GPUs of the engine waited for each other for so long that NCCL gave up
> Set vllm_engine_peer_to_peer to forbidden if it happens at each start; look for Xid lines in `journalctl -k`
heals nccl
/ (?P<text>nccl(?:UnhandledCuda|System|Internal|Remote)Error)
/ (?P<text2>(?<=NCCL error: )(?:unhandled|internal|remote)[\w ]* error)
= the GPUs of the engine cannot talk to each other ({text}{text2})
> Set NCCL_DEBUG=INFO for the engine; on hosts without NVLink try NCCL_P2P_DISABLE=1 and disable_custom_all_reduce
heals custom_all_reduce
/ custom_all_reduce\.cuh:\d+ '(?P<text>[^']+)'
= vLLM's own exchange between GPUs failed ({text})
> If it comes back, add --disable-custom-all-reduce to extra_args of the engine, which then uses NCCL alone
heals ranks_apart
/ Dist(?:Network|Store)Error: (?P<text>(?:The client socket has t|wait t|T)imed? ?out after \d+ ?\w+)
= the processes of the engine did not find each other ({text})
> Look in the journal for the rank that ended first; VLLM_HOST_IP in extra_env must be 127.0.0.1 or absent
heals address_in_use
/ \[Errno 98\] (?:A|error while attempting to bind on a)ddress|EADDRINUSE|ZMQError: Address already in use
= an address inside the container was taken twice
> Remove VLLM_PORT, --port and --master-port from the engine: its container has a network of its own
heals ready_timeout
/ Timed out waiting for engine(?: core processes to start|s to send initial message)
= vLLM's own limit for the start of its engine process has passed
> Raise VLLM_ENGINE_READY_TIMEOUT_S in extra_env of the engine
final too_many_files
/ (?<!like `OSError: )\[Errno 24\] Too many open files|ZMQError:? Too many open files
= the engine may not open as many files as it needs
> Raise nofile in vllm_engine_ulimits
final no_threads
/ RuntimeError: can't start new thread
/ pthread_create(?: failed for thread \d+ of \d+)?: (?P<text>Resource temporarily unavailable|Operation not permitted)
= the engine may not start as many threads as it needs ({text})
> Raise vllm_engine_pids_limit; if it is not permitted at all, the Docker Engine is too old for the image
final unknown_argument
/ error: unrecognized arguments?: (?P<text>.+)
= this vLLM does not know the argument {text}
> Correct extra_args of the engine, or choose a version that knows it (`vllm serve --help` in the image)
final bad_argument
/ error: argument (?P<name>[-\w/]+): (?P<text>.+)
= vLLM refuses the argument {name}: {text}
> Correct the engine's settings
final unknown_parser
/ invalid (?:tool call|reasoning) parser: (?P<name>\S{1,99}) \(chose from \{ ?(?P<known>[^}]{1,900})
/ (?:parser|helper): '(?P<name2>\w+)' not found in \w+_parsers
/ [Pp]arser '(?P<name3>\w+)' not found\. Available parsers: (?P<known3>.{1,900})
= this vLLM has no parser {name}{name2}{name3} ({known}{known3})
> Correct tool_call_parser or reasoning_parser of the engine, or choose a newer engine version
final chat_template_missing
/ supplied chat template string \((?P<path>[^)]*)\) appears path-like, but doesn't exist
= the chat template {path} is not in the container
> Put the file into chat_templates beside the inventory and name it in chat_template of the engine, not in extra_args
final max_model_len_too_long
/ User-specified max_model_len \((?P<length>\d+)\) is greater than the derived max_model_len(?:.{0,300}?=(?P<most>\d+))?
= max_model_len {length} is longer than the model's own limit {most}
> Set max_model_len of the engine to the model's limit or less
final batch_too_small
/ max_num_batched_tokens \((?P<tokens>\d+)\) is smaller than max_model_len \((?P<needed>\d+)\)
/ max_tokens_per_mm_item \((?P<needed2>\d+)\) is larger than max_num_batched_tokens \((?P<tokens2>\d+)\)
= max_num_batched_tokens is {tokens}{tokens2}, and {needed}{needed2} tokens have to be computed at once
> Set max_num_batched_tokens of the engine to {needed}{needed2} or more
final bad_shape
/ (?P<text>Total number of attention heads \(\d+\) must be divisible by tensor parallel size \(\d+\))
= {text}
> Choose a tensor_parallel_size that divides it
final bad_shape
/ The (?:in|out)put size is not aligned with the quantized weight shape
/ (?P<text>(?:Weight \w+|The \w+ of \S+ and up's weight) = \d+ is not divisible by [\w ]+ = \d+)
= tensor_parallel_size cuts a quantized weight into parts that its kernel cannot compute {text}
> Lower tensor_parallel_size of the engine, or choose another precision of the model
final quantization_mismatch
/ in the model config \((?P<model>[\w-]+)\) does not match the quantization method specified in the `?quantization`?
+  argument \((?P<given>[\w-]+)\)
= the model's quantization is {model}, and the engine states {given}
> Remove --quantization from extra_args of the engine: vLLM reads it from the model
final quantization_unknown
/ [Uu]nknown quantization method: (?P<name>\S*)\. Must be one of
= this vLLM does not know the model's quantization {name}
> Choose a newer engine version (vllm_image_base), or another precision of the model
final lora_rank
/ LoRA rank (?P<rank>\d+) is greater than max_lora_rank (?P<most>\d+)
= an adapter has rank {rank}, and the engine takes {most} at most
> Add --max-lora-rank={rank} to extra_args of the engine
final lora_unsupported
/ (?P<model>[A-Z]\w{2,99}) does not support LoRA(?: yet|, but LoRA is enabled)
= this vLLM takes no adapters for {model}
> Remove --enable-lora from extra_args and serve weights into which the adapter was merged, or choose a newer version
final remote_code
/ contains custom code which must be executed to|requires you to execute (?:the \w+ file|custom code)
= the model runs only with code that lies beside its weights
> Choose an engine version that knows the model; docs/profiles.md, Accept a risk, says what --trust-remote-code means
final weights_damaged
/ (?P<text>SafetensorError\S*.*|HeaderTooLarge|HeaderTooSmall|InvalidHeader\w*|MetadataIncompleteBuffer)
/ (?P<text2>Error while deserializing header.*)
= a weights file is damaged or cut short: {text}{text2}
> Run the weights stage with a full verification: it fetches what does not match its hash again
final weights_mismatch
/ There is no module or parameter named '(?P<name>[\w.-]+)' in (?P<model>\w+)
= the weights have {name}, which vLLM's class {model} does not know
> Choose an engine version that knows the model, or weights as their publisher made them
final weights_mismatch
/ Tried to load weights of size|Attempted to load weight \(|assert param_data\.shape == loaded_weight\.shape
= a tensor of the weights has another shape than vLLM expects
> Remove --quantization from extra_args of the engine, or choose an engine version that knows the format
final hub_gated
/ GatedRepoError|Cannot access gated repo|trying to access a gated repo
= vLLM asked the model hub for a gated model, but engines need no network
> Accept the licence at the hub, set model_weights_token and run the weights stage; the engine gets the directory
final harmony_vocabulary
/ HarmonyError: error downloading or loading vocab file
= the parser of gpt-oss wants to download its vocabulary, but engines have no network
> Put o200k_base.tiktoken beside the weights, and that directory (/models/...) into TIKTOKEN_ENCODINGS_BASE of extra_env
final hub_offline
/ OfflineModeIsEnabled|LocalEntryNotFoundError|outgoing traffic has been disabled|offline mode is enabled
= vLLM asked the model hub for a file, but engines run offline
> Give the engine the directory of its weights, complete with tokenizer and configuration: run the weights stage
final weights_missing
/ Cannot find any model weights
/ No such file or directory: ['\"]?(?P<path>/models/[^'\"\s]+)
/ Invalid repository ID or local directory specified: '?(?P<path2>[^'\s]+)'?
/ (?P<path3>(?<!\S)\S{1,300}) is not a local folder and is not a valid model identifier
/ (?P<path4>(?<!\S)/models/\S{1,300}) does not appear to have (?:a file|files) named
= files of the model are missing: {path}{path2}{path3}{path4}
> Run the weights stage; see that the directory is mounted and readable for the user vllm-edge
final transformers_too_old
/ model type `(?P<type>[^`]+)` but Transformers does not recognize this architecture
= the image's transformers does not know the architecture {type}
> Run the image stage with a transformers requirement that knows it (Gemma 4: 5.5.0 or newer)
final transformers_too_old
/ Tokenizer class (?P<name>\w+) does not exist or is not currently imported
= the image's transformers does not know the tokenizer {name}
> Raise vllm_image_requirement to the transformers with which the model was saved, and run the image stage
final transformers_too_old
/ (?P<text>`?rope_scaling`? (?:should have a 'rope_type' key|must be a dictionary with two fields))
= the image's transformers and the model's config.json do not agree: {text}
> Raise vllm_image_requirement, or choose a newer engine version (vllm_image_base)
final user_unknown
/ getpwuid\(\): uid not found: (?P<uid>\d+)
= the image does not know the user {uid}, and torch asks for its name
> Run the engines stage, which sets USER for every engine, or choose an engine version with torch 2.13 or newer
final image_broken
/ ImportError: (?P<name>lib[\w.+-]+): cannot open shared object file
/ ImportError: \S+: undefined symbol: (?P<name2>\w+)
= libraries of the image do not go together: {name}{name2} is not there
> Take vllm_image_base as it was published, without packages that replace its torch, and run the image stage
final package_missing
/ Please install (?P<name>[\w.-]+?)(?:[<>=]=?[\w.]+)? (?:via|by running|with) [`'"]?pip install
= the image lacks the package {name}
> Choose an engine version that has it (vllm_image_base), or another precision or format of the model
final architecture_unknown
/ Model architectures \['(?P<name>\w+)'.{0,300}?\] are not supported for now
/ GGUF model with architecture (?P<name2>[\w.-]+) is not supported yet
= this vLLM does not know the architecture {name}{name2}
> Choose a newer engine version (vllm_image_base), or another model
final architecture_broken
/ Model architectures \['(?P<name>\w+)'.{0,300}?\] failed to be inspected
= vLLM could not import its own class for {name}; an earlier line in the journal says why
> Take vllm_image_base as it was published, and run the image stage
final config_damaged
/ Unrecognized model in|is not a valid JSON file|Can't load tokenizer|Couldn't instantiate the backend tokenizer|Error
+  parsing .*config\.json
= a configuration or tokenizer file of the model cannot be read
> Verify the weights directory in full and fetch it again
final config_damaged
/ JSONDecodeError
@ models
= a configuration, tokenizer or index file of the model is damaged or cut short
> Verify the weights directory in full and fetch it again
final cache_damaged
/ vLLM failed to compile the model\. The most likely|failed to get the hash of the compiled graph
/ Expected tensors only, but got
= what the compile cache has of the model is damaged, or does not fit it any more
> Empty the compile cache (`find /data/vllm/cache/<engine> -mindepth 2 -delete`) and start the unit, which fills it
final cache_damaged
/ JSONDecodeError|EOFError|UnpicklingError|BadZipFile|UnicodeDecodeError|(?:bad )?marshal data
@ compilers
= a file of the compile cache is damaged or cut short, as a power cut leaves one that is being written
> Empty the compile cache (`find /data/vllm/cache/<engine> -mindepth 2 -delete`) and start the unit, which fills it
heals cache_damaged
/ No such file or directory: '(?P<path>/cache/[^']+)'
/ No such file or directory: '(?P<path2>/[^']*(?:\.triton/cache|torch_compile_cache|torchinductor_\w+)/[^']+)'
= a file of the compile cache was removed while it was in use: {path}{path2}
> Another start creates it again
final nvcc_missing
/ Could not find nvcc|No such file or directory: 'nvcc'|/bin/nvcc: not found
= FlashInfer wants to compile a kernel, and the image has no nvcc
> Set VLLM_USE_FLASHINFER_SAMPLER to 0 in extra_env of the engine, or choose an image with the CUDA toolkit
final compiler_missing
/ Failed to find C compiler|No working C\+\+ compiler|fatal error: Python\.h|directory: '(?:g\+\+|gcc|cc|c\+\+)'
= the engine needed a C compiler, or Python's headers, to build a kernel
> Add g++ and the Python headers to the image
heals compile_failed
/ Ninja build failed
= a kernel could not be built
> The compiler's message is in the journal; VLLM_USE_FLASHINFER_SAMPLER set to 0 in extra_env may avoid the kernel
final not_permitted
/ PermissionError: \[Errno 13\] Permission denied: '(?P<path>/[^']*)'
= the engine's user may not use {path}
> Weights belong to root:vllm-edge with 0640/0750, caches to vllm-edge: run the weights and engines stages. Elsewhere it
> may write /tmp only: remove what leads there from extra_env and extra_args of the engine
final read_only
/ OSError: \[Errno 30\] Read-only file system: '(?P<path>[^']+)'
= the engine wants to write {path}, and its root is read-only
> Mount a cache or a tmpfs there in docker-create
heals disk_full
/ No space left on device(?P<path>: '[^']+')?
= a file system the engine writes to is full{path}
> /data and /cache are on the disks that `vllm-edge doctor` shows (storage.data), which may also lack inodes (`df -i`);
> /tmp and /dev/shm are the container's own (vllm_engine_shm_size)
heals cuda_error
/ (?:CUDA error|Triton Error \[CUDA\]): (?P<text>[a-z][^.]{3,120})
= CUDA reported an error: {text}
> The traceback in the journal names the place; 'journalctl -k -g NVRM' may say more
"""

_DOCKER = r"""
heals cdi_unresolvable
/ unresolvable CDI devices? (?P<device>\S+)
= Docker knows no CDI device {device}
> Compare `nvidia-ctk cdi list` with `nvidia-smi -L`, then `systemctl restart nvidia-cdi-refresh.service`
heals cdi_disabled
/ could not select device driver "cdi"|CDI device injection (?:is )?(?:not enabled|disabled)
/ error gathering device information while adding custom device "nvidia\.com/
= the Docker Engine does not resolve CDI devices
> Docker 25 or newer with {{"features": {{"cdi": true}}}} in /etc/docker/daemon.json is needed; run the host stage again
final image_missing
/ No such image: (?P<image>\S+)|Unable to find image '(?P<image2>[^']+)' locally
= the image {image}{image2} is not on this host
> Run the image stage (`ansible-playbook site.yml`); units never pull
heals name_taken
/ Conflict\. The container name "/?(?P<name>[^"]+)" is already in use
= a container named {name} appeared while this one was being created
> Look with `docker ps -a`; this name belongs to the engine
heals mount_missing
/ bind source path does not exist: (?P<path>\S+)
= the directory {path}, which the engine mounts, does not exist
> Mount the file system that holds it, or run the weights stage; it is tried again in case the disk is late
final docker_argument
/ ^(?:docker create: )?(?P<text>unknown (?:shorthand )?flag: \S+|invalid argument .*|invalid reference format.*)
= `docker create` does not understand its arguments: {text}
> The engines stage writes the file docker-create: correct the engine's settings and run it again
final limit_refused
/ error setting rlimit(?:s for ready process|.{0,300}?type (?P<type>\d+))
= the kernel refuses a limit that docker-create asks for with --ulimit
> Set LimitMEMLOCK=infinity in containerd.service, whose limits containers have (`systemctl show` tells it)
heals docker_out_of_space
/ no space left on device
= Docker's disk is full
> Free space, or inodes, where `vllm-edge doctor` names it (storage.images; `docker system df`)
final entrypoint_missing
/ exec: "(?P<name>[^"]+)": (?:executable file not found|stat |permission denied)
= the image has no program {name}
> The image is not a vLLM image: run the image stage
"""

# In vLLM 0.32.0, and alike in 0.19 to 0.33: quantization/modelopt.py:1000 (of 0.19.0; until 0.25),
# kernels/linear/nvfp4/marlin.py:35, quantization/utils/marlin_utils_fp4.py:342 and marlin_utils_fp8.py:109;
# quantization/utils/marlin_utils.py:240; quantization/auto_awq.py:326 and auto_gptq.py:245;
# fused_moe/fused_moe.py:1164, fp8_utils.py:954 and mamba_ssm.py:108; device_communicators/custom_all_reduce.py:272
# and 287; quantization/kv_cache.py:164.
_START = r"""
warns experimental_format
/ Detected ModelOpt (?P<name>\w+) checkpoint.{0,60}Please note that the format is experimental
= vLLM calls the format of these weights (ModelOpt {name}) experimental: another release may read them otherwise
> Run playbooks/quality.yml after an upgrade of the engine
warns weight_only
/ Your GPU does not have native support for (?P<bits>FP[48]) computation
= the engine does not compute in {bits}: the Marlin kernel unpacks its weights, which saves memory and no arithmetic
> The plan's speed counts it; long prompts are slower than with a kernel that computes in {bits}
warns kernel_padded
/ Marlin requires thread-tile padding for
= the Marlin kernel pads weights of this model at this tensor_parallel_size, and what it computes with them each time
> Another tensor_parallel_size may need no padding and be faster
warns kernel_fallback
/ is not supported by \w*Marlin\w*\. Falling back to (?P<kernel>unoptimized AWQ|Moe WNA16) kernels
= vLLM's fast kernel does not take some layers, which run in its {kernel} kernels
> Another tensor_parallel_size or precision of the model may be faster
warns kernel_untuned
/ Using default (?P<what>MoE|W8A8 Block FP8|Mamba SSU)(?: kernel)? config\. Performance might be sub-optimal
= vLLM has no tuned settings of its {what} kernel for this GPU and takes defaults
> A newer release may have them
warns peer_to_peer
/ Custom allreduce is disabled because it's not supported on (?P<text>more than two PCIe-only GPUs)
/ Custom allreduce is disabled because your (?P<text2>platform lacks GPU P2P capability or P2P test failed)
= the exchange of vLLM's own between GPUs is off ({text}{text2}), and NCCL takes its place
> Without NVLink this is usual, and the plan's speed counts it
warns kv_scales
/ Using KV cache scaling factor 1\.0 for fp8
= the checkpoint has no scales for a KV cache in FP8, and vLLM takes 1.0
> Compare answers with kv_cache_dtype bfloat16 (playbooks/quality.yml) if precision matters
"""


def _read_table(text: str) -> Iterator[Signature]:
    for row in re.split(r"\n(?=final |heals |warns )", text.strip()):
        head, *lines = row.splitlines()
        kind, cause = head.split()
        told = {mark: [line[2:] for line in lines if line[0] == mark] for mark in "@=>#"}
        for number in told["#"]:
            error = ERRORS[int(number)]
            told["="], told[">"] = [f"{error.cause} (CUDA error {number})"], [error.remedy]
        pattern = "".join(f"|{line[2:]}" if line[0] == "/" else line[2:] for line in lines if line[0] in "/+")
        reason, remedy = " ".join(told["="]), " ".join(told[">"])
        place = _PLACES[told["@"][0]] if told["@"] else None
        yield Signature(cause, pattern[1:], reason, remedy, kind == "heals", place)


ENGINE_SIGNATURES = tuple(_read_table(_ENGINE))
"""Messages in vLLM's log."""
SIGNATURES = (*_read_table(_DOCKER), *ENGINE_SIGNATURES)
"""With Docker's messages when it refuses to create or start a container; the engine's log contains none of them."""
START_WARNINGS = tuple(_read_table(_START))
"""Messages of a start that succeeds."""
