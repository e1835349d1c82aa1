# SPDX-License-Identifier: Apache-2.0
"""Model classes for text that releases of vLLM have, and those before them have not: data that tools/vllm_release.py
writes from model_executor/models/registry.py, never edited by hand. What is in no line exists since 0.19.0, or never.
"""

from collections.abc import Mapping

ADDED: Mapping[str, str] = {
    "0.20.0": """
Cheers CheersForConditionalGeneration DeepseekV4ForCausalLM Exaone4_5_ForConditionalGeneration
FireRedLIDForConditionalGeneration Granite4VisionForConditionalGeneration HYV3ForCausalLM Ministral3ForCausalLM
NemotronH_Nano_Omni_Reasoning_V3 NemotronH_Super_Omni_Reasoning_V3 Param2MoEForCausalLM Phi4ForCausalLMV
Rnj1ForCausalLM TeleChat3ForCausalLM
""",
    "0.21.0": """
Cohere2MoeForCausalLM HfMoondream LagunaForCausalLM MiMoV2ForCausalLM MiMoV2OmniForCausalLM Moondream3ForCausalLM
QianfanOCRForConditionalGeneration
""",
    "0.22.0": """
InternS2PreviewForConditionalGeneration MiniCPMV4_6ForConditionalGeneration OpenVLAForActionPrediction
""",
    "0.23.0": """
Cosmos3ForConditionalGeneration Gemma4UnifiedForConditionalGeneration GraniteSpeechPlusForConditionalGeneration
MellumForCausalLM Step3p7ForConditionalGeneration
""",
    "0.24.0": """
DiffusionGemmaForBlockDiffusion HrmTextForCausalLM MiniMaxM3SparseForCausalLM MiniMaxM3SparseForConditionalGeneration
MossAudioModel
""",
    "0.25.0": """
LlavaOnevision2ForConditionalGeneration MossTranscribeDiarizeForConditionalGeneration UnlimitedOCRForCausalLM
""",
    "0.26.0": """
Cosmos3EdgeForConditionalGeneration InklingForCausalLM InklingForConditionalGeneration LongcatFlashNgramForCausalLM
""",
    "0.27.0": """
ExaoneMoeForCausalLM KimiK3ForConditionalGeneration Qwen3_5ForCausalLM Qwen3_5MoeForCausalLM VaultGemmaForCausalLM
VibeVoiceAsrForConditionalGeneration
""",
    "0.28.0": """
BailingMoeV3ForCausalLM Dots3NoteForCausalLM InternS2MobiusForConditionalGeneration MuseGlimmerForCausalLM
MuseGlimmerForConditionalGeneration
""",
    "0.29.0": """
GraniteMoeSWAForCausalLM GraniteSWAForCausalLM HYV4ForCausalLM NemotronH_Omni_Reasoning_V3 Qwen4ExpForCausalLM
Qwen4ExpForConditionalGeneration
""",
    "0.30.0": """
BailingMoeV3VLForConditionalGeneration CohereCompassForConditionalGeneration DeepseekV41ForCausalLM
DeepseekV4ForConditionalGeneration Glm5NextForCausalLM Glm5NextForConditionalGeneration K2HorizonForCausalLM
NanbeigeForCausalLM
""",
    "0.32.0": "ExaoneMoEForCausalLM MiniCPMV4_7ForConditionalGeneration",
    "0.33.0": """
AliceAIForCausalLM Alpamayo2Super BeamForCausalLM DomynEdgeForCausalLM DoryForCausalLM FlintForCausalLM
Kolibri1ForCausalLM MiniCPMOcrForConditionalGeneration MuseSparkForConditionalGeneration RadioMBartPrefixForCausalLM
Step5ForCausalLM Step5ForConditionalGeneration
""",
}
GONE: Mapping[str, str] = {
    "0.23.0": "JAISLMHeadModel",
    "0.24.0": """
BambaForCausalLM Dots1ForCausalLM InternLM2VEForCausalLM InternLMForCausalLM MiniMaxForCausalLM MiniMaxM1ForCausalLM
MiniMaxText01ForCausalLM MiniMaxVL01ForConditionalGeneration QWenLMHeadModel QwenVLForConditionalGeneration
XverseForCausalLM
""",
    "0.25.0": """
AquilaForCausalLM AquilaModel AyaVisionForConditionalGeneration BaiChuanForCausalLM BaichuanForCausalLM
Grok1ForCausalLM Grok1ModelForCausalLM MantisForConditionalGeneration MusicFlamingoForConditionalGeneration
Tarsier2ForConditionalGeneration TarsierForConditionalGeneration
""",
    "0.26.0": "FuyuForCausalLM PersimmonForCausalLM TeleChatForCausalLM",
    "0.27.0": "ExaoneMoEForCausalLM OuroForCausalLM Plamo2ForCausalLM",
    "0.29.0": """
ArcticForCausalLM ChameleonForConditionalGeneration Cheers CheersForConditionalGeneration Fairseq2LlamaForCausalLM
FireRedLIDForConditionalGeneration GritLM HCXVisionForCausalLM MPTForCausalLM MptForCausalLM RWForCausalLM
StableLMEpochForCausalLM
""",
}
