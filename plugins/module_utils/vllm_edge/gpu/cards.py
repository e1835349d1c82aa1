# SPDX-License-Identifier: Apache-2.0
"""NVIDIA's cards of compute capability 7.5 and newer with 8 GiB or more, as a table that `models` reads.

A line has, between bars: the name that NVML and nvidia-smi print; the compute capability; the memory bandwidth in GB/s
(10^9 bytes); where it was read; `NVLink` if the card has it; the total that nvidia-smi prints in MiB, several if cards
of one name have different memory, none if it prints N/A; and the MiB of it that CUDA offers, with the program that
printed them.

Compute capabilities are those of NVIDIA's list (developer.nvidia.com/cuda-gpus). Bandwidths are from:
sheet: NVIDIA's data sheet of the card. pages: public pages on the card, of technical.city, topcpu.net and others.
geforce: github.com/CYBIRD-D/How-to-Choose-your-LLM-Model-for-translation, Nvidia_GPU_Specification.md.
memory: none was found; they are unconfirmed, and the plan says so.

Totals of nvidia-smi are from public files in which its output is. What CUDA offers is the least that was found in
public logs of programs on Linux, because older drivers keep less for themselves and Windows hides it; of a card with
several totals it belongs to the largest. `-` means that no such log was found. The L4 was read on the reference host.
"""

from __future__ import annotations

CARDS = """
Tesla T4                                          |  7.5 |  320 | sheet   |        | 15360       | 14909 vLLM
NVIDIA TITAN RTX                                  |  7.5 |  672 | pages   |        | 24576       | -
Quadro RTX 4000                                   |  7.5 |  416 | memory  |        | 8192        | -
Quadro RTX 5000                                   |  7.5 |  448 | pages   |        | 16384       | -
Quadro RTX 6000                                   |  7.5 |  672 | pages   |        | 24576       | -
Quadro RTX 8000                                   |  7.5 |  672 | pages   |        | 49152       | 48380 Ultralytics
NVIDIA GeForce RTX 2060 SUPER                     |  7.5 |  448 | pages   |        | 8192        | -
NVIDIA GeForce RTX 2070                           |  7.5 |  448 | memory  |        | 8192        | -
NVIDIA GeForce RTX 2070 SUPER                     |  7.5 |  448 | memory  |        | 8192        | -
NVIDIA GeForce RTX 2080                           |  7.5 |  448 | pages   |        | 8192        | -
NVIDIA GeForce RTX 2080 SUPER                     |  7.5 |  496 | memory  |        | 8192        | -
NVIDIA GeForce RTX 2080 Ti                        |  7.5 |  616 | pages   |        | 11264       | 10825 Ultralytics
NVIDIA A100-PCIE-40GB                             |  8.0 | 1555 | sheet   |        | 40960       | 40441 Unsloth
NVIDIA A100-SXM4-40GB                             |  8.0 | 1555 | sheet   | NVLink | 40960       | 40441 Unsloth
NVIDIA A100 80GB PCIe                             |  8.0 | 1935 | sheet   |        | 81920       | 81038 Ultralytics
NVIDIA A100-SXM4-80GB                             |  8.0 | 2039 | sheet   | NVLink | 81920       | 81038 Ultralytics
NVIDIA A30                                        |  8.0 |  933 | memory  |        | 24576       | 24164 Ultralytics
NVIDIA A2                                         |  8.6 |  200 | memory  |        | 15356       | -
NVIDIA A10                                        |  8.6 |  600 | sheet   |        | 23028       | 22584 vLLM
NVIDIA A10G                                       |  8.6 |  600 | memory  |        | 23028       | 22584 vLLM
NVIDIA A16                                        |  8.6 |  200 | memory  |        | 15356       | -
NVIDIA A40                                        |  8.6 |  696 | sheet   |        | 46068       | 45416 torch
NVIDIA RTX A2000 12GB                             |  8.6 |  288 | memory  |        | 12282       | -
NVIDIA RTX A4000                                  |  8.6 |  448 | memory  |        | 16376       | 15967 Unsloth
NVIDIA RTX A4500                                  |  8.6 |  640 | pages   |        | 20470       | -
NVIDIA RTX A5000                                  |  8.6 |  768 | memory  |        | 24564       | 24114 torch
NVIDIA RTX A5500                                  |  8.6 |  768 | memory  |        | 24564       | -
NVIDIA RTX A6000                                  |  8.6 |  768 | sheet   |        | 49140       | 48565 Unsloth
NVIDIA GeForce RTX 3050                           |  8.6 |  224 | geforce |        | 8192        | -
NVIDIA GeForce RTX 3060                           |  8.6 |  360 | geforce |        | 12288       | 11910 Ultralytics
NVIDIA GeForce RTX 3060 Ti                        |  8.6 |  448 | geforce |        | 8192        | 7833 Ultralytics
NVIDIA GeForce RTX 3070                           |  8.6 |  448 | geforce |        | 8192        | 7753 Ultralytics
NVIDIA GeForce RTX 3070 Ti                        |  8.6 |  608 | geforce |        | 8192        | -
NVIDIA GeForce RTX 3080                           |  8.6 |  760 | geforce |        | 10240 12288 | -
NVIDIA GeForce RTX 3080 Ti                        |  8.6 |  912 | geforce |        | 12288       | 11910 Ultralytics
NVIDIA GeForce RTX 3090                           |  8.6 |  936 | geforce |        | 24576       | 24120 vLLM
NVIDIA GeForce RTX 3090 Ti                        |  8.6 | 1008 | geforce |        | 24564       | 24114 torch
NVIDIA GeForce RTX 3070 Laptop GPU                |  8.6 |  448 | geforce |        | 8192        | -
NVIDIA GeForce RTX 3070 Ti Laptop GPU             |  8.6 |  448 | geforce |        | 8192        | -
NVIDIA GeForce RTX 3080 Laptop GPU                |  8.6 |  448 | geforce |        | 8192 16384  | -
NVIDIA GeForce RTX 3080 Ti Laptop GPU             |  8.6 |  512 | geforce |        | 16384       | -
NVIDIA L4                                         |  8.9 |  300 | sheet   |        | 23034       | 22563.125 vLLM
NVIDIA L20                                        |  8.9 |  864 | memory  |        | 46068       | 45563 vLLM
NVIDIA L40                                        |  8.9 |  864 | memory  |        | 46068       | -
NVIDIA L40S                                       |  8.9 |  864 | sheet   |        | 46068       | 45455 vLLM
NVIDIA RTX 2000 Ada Generation                    |  8.9 |  224 | memory  |        | 16380       | -
NVIDIA RTX 4000 SFF Ada Generation                |  8.9 |  280 | memory  |        | 20475       | 20055 Ultralytics
NVIDIA RTX 4000 Ada Generation                    |  8.9 |  360 | pages   |        | 20475       | -
NVIDIA RTX 4500 Ada Generation                    |  8.9 |  432 | pages   |        | 24570       | -
NVIDIA RTX 5000 Ada Generation                    |  8.9 |  576 | pages   |        | 32760       | -
NVIDIA RTX 5880 Ada Generation                    |  8.9 |  960 | memory  |        | 49140       | -
NVIDIA RTX 6000 Ada Generation                    |  8.9 |  960 | sheet   |        | 49140       | 48497 Ultralytics
NVIDIA GeForce RTX 4060                           |  8.9 |  272 | geforce |        | 8188        | 7807 Ultralytics
NVIDIA GeForce RTX 4060 Ti                        |  8.9 |  288 | geforce |        | 8188 16380  | 15945 Unsloth
NVIDIA GeForce RTX 4070                           |  8.9 |  504 | geforce |        | 12282       | -
NVIDIA GeForce RTX 4070 SUPER                     |  8.9 |  504 | geforce |        | 12282       | -
NVIDIA GeForce RTX 4070 Ti                        |  8.9 |  504 | geforce |        | 12282       | -
NVIDIA GeForce RTX 4070 Ti SUPER                  |  8.9 |  672 | geforce |        | 16376       | 15934 torch
NVIDIA GeForce RTX 4080                           |  8.9 |  717 | geforce |        | 16376       | -
NVIDIA GeForce RTX 4080 SUPER                     |  8.9 |  736 | geforce |        | 16376       | 15944 Ultralytics
NVIDIA GeForce RTX 4090                           |  8.9 | 1008 | geforce |        | 24564       | 24074 Unsloth
NVIDIA GeForce RTX 4090 D                         |  8.9 | 1008 | geforce |        | 24564       | -
NVIDIA GeForce RTX 4060 Laptop GPU                |  8.9 |  256 | geforce |        | 8188        | -
NVIDIA GeForce RTX 4070 Laptop GPU                |  8.9 |  256 | geforce |        | 8188        | -
NVIDIA GeForce RTX 4080 Laptop GPU                |  8.9 |  432 | geforce |        | 12282       | -
NVIDIA GeForce RTX 4090 Laptop GPU                |  8.9 |  576 | geforce |        | 16376       | -
NVIDIA H100 PCIe                                  |  9.0 | 2000 | memory  |        | 81559       | 81008 torch
NVIDIA H100 80GB HBM3                             |  9.0 | 3350 | sheet   | NVLink | 81559       | 81079 Unsloth
NVIDIA H100 NVL                                   |  9.0 | 3900 | memory  | NVLink | 95830       | 95248 Unsloth
NVIDIA H20                                        |  9.0 | 4000 | memory  | NVLink | 97871       | -
NVIDIA GH200 480GB                                |  9.0 | 4000 | memory  | NVLink | 97871       | 96762 vLLM
NVIDIA H200                                       |  9.0 | 4800 | sheet   | NVLink | 143771      | 143052 Unsloth
NVIDIA H200 NVL                                   |  9.0 | 4800 | memory  | NVLink | 143771      | -
NVIDIA B200                                       | 10.0 | 8000 | pages   | NVLink | 183359      | 182631 torch
NVIDIA GB200                                      | 10.0 | 8000 | memory  | NVLink | 189471      | -
NVIDIA B300 SXM6 AC                               | 10.3 | 8000 | pages   | NVLink | 275040      | 274109 vLLM
NVIDIA GB300                                      | 10.3 | 8000 | memory  | NVLink | 256703 284208 | -
NVIDIA RTX PRO 2000 Blackwell                     | 12.0 |  288 | pages   |        | 16311       | -
NVIDIA RTX PRO 4000 Blackwell                     | 12.0 |  672 | pages   |        | 24467       | -
NVIDIA RTX PRO 4500 Blackwell                     | 12.0 |  896 | pages   |        | 32623       | -
NVIDIA RTX PRO 5000 Blackwell                     | 12.0 | 1344 | pages   |        | 48935       | -
NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition | 12.0 | 1792 | pages   |        | 97887       | 97247 llama.cpp
NVIDIA RTX PRO 6000 Blackwell Workstation Edition | 12.0 | 1792 | pages   |        | 97887       | 97285 vLLM
NVIDIA RTX PRO 6000 Blackwell Server Edition      | 12.0 | 1597 | memory  |        | 97887       | 97250 Unsloth
NVIDIA GeForce RTX 5050                           | 12.0 |  320 | geforce |        | 8151        | -
NVIDIA GeForce RTX 5060                           | 12.0 |  448 | geforce |        | 8151        | -
NVIDIA GeForce RTX 5060 Ti                        | 12.0 |  448 | geforce |        | 8151 16311  | 15848 Ultralytics
NVIDIA GeForce RTX 5070                           | 12.0 |  672 | geforce |        | 12227       | -
NVIDIA GeForce RTX 5070 Ti                        | 12.0 |  896 | geforce |        | 16303       | 15838 llama.cpp
NVIDIA GeForce RTX 5080                           | 12.0 |  960 | geforce |        | 16303       | 15840 Ultralytics
NVIDIA GeForce RTX 5090                           | 12.0 | 1792 | geforce |        | 32607       | 32094 Unsloth
NVIDIA GeForce RTX 5090 D                         | 12.0 | 1792 | memory  |        | 32607       | -
NVIDIA GeForce RTX 5050 Laptop GPU                | 12.0 |  384 | geforce |        | 8151        | -
NVIDIA GeForce RTX 5060 Laptop GPU                | 12.0 |  384 | geforce |        | 8151        | -
NVIDIA GeForce RTX 5070 Laptop GPU                | 12.0 |  384 | geforce |        | 8151        | -
NVIDIA GeForce RTX 5070 Ti Laptop GPU             | 12.0 |  672 | geforce |        | 12227       | -
NVIDIA GeForce RTX 5080 Laptop GPU                | 12.0 |  896 | geforce |        | 16303       | 15842 Unsloth
NVIDIA GeForce RTX 5090 Laptop GPU                | 12.0 |  896 | geforce |        | 24463       | -
NVIDIA GB10                                       | 12.1 |  273 | pages   |        |             | 124547 Unsloth
"""
