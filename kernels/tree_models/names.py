"""Names of a family's tensors by what they are, as they are published. The usual ones are Llama's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class WeightNames:
    """Names of modules; `.weight` and `.bias` are added. Where several names stand, the tensors lie one above another
    in one product; a single name there is a checkpoint's own merged tensor.

    Below `layer`, names are relative to it; "{layer}" and "{expert}" stand for their numbers, "{half}" for 0 and 1 in
    turn where a published layer is two.
    """

    embedding: str = "model.embed_tokens"
    embedding_norm: str = ""
    final_norm: str = "model.norm"
    head: str = "lm_head"
    head_transform: str = "lm_head.dense"
    head_norm: str = "lm_head.norm"
    layer: str = "model.layers.{layer}."
    numbers: tuple[int, ...] = ()  # of the layers, where not all that are published are read, or some are two
    positions: str = ""  # of the table of vectors that are added by position
    # Weights of attention's and the MLP's products have inputs before outputs.
    by_columns: bool = False

    before_attention: str = "input_layernorm"
    after_attention: str = ""
    before_mlp: str = "post_attention_layernorm"
    after_mlp: str = ""
    residual_norms: tuple[str, str] = ("post_attention_residual_scale.residual", "post_mlp_residual_scale.residual")

    qkv: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    qkv_by_group: bool = False  # their one tensor has for each key head the queries that read it, its keys, its values
    out: str = "self_attn.o_proj"
    query_norm: str = "self_attn.q_norm"
    key_norm: str = "self_attn.k_norm"
    sinks: str = "self_attn.sinks"  # whole, as it has no suffix
    output_gate: str = "self_attn.g_proj"
    lambdas: tuple[str, ...] = tuple(f"self_attn.lambda_{one}" for one in ("q1", "k1", "q2", "k2"))  # whole

    # Of latent attention.
    query: str = "self_attn.q_proj"
    query_latent: str = "self_attn.q_a_proj"
    query_latent_norm: str = "self_attn.q_a_layernorm"
    query_expanding: str = "self_attn.q_b_proj"
    latent: str = "self_attn.kv_a_proj_with_mqa"
    latent_norm: str = "self_attn.kv_a_layernorm"
    expanding: str = "self_attn.kv_b_proj"

    # Of what is in attention's place.
    mixer_in: tuple[str, ...] = ("linear_attn.in_proj_qkv", "linear_attn.in_proj_z")
    mixer_gates: tuple[str, ...] = ("linear_attn.in_proj_b", "linear_attn.in_proj_a")
    convolution: str = "linear_attn.conv1d"
    convolution_parts: tuple[str, ...] = ()  # modules that are published in its place, in their order
    head_convolution: str = "self_attn.qkv_proj.conv_qk_grouped"  # of each head of compressed attention
    renamed: tuple[tuple[str, str], ...] = ()  # names of modules that are published, and those that stand here for them
    decay: str = "linear_attn.A_log"  # whole, as these two have no suffix
    decay_bias: str = "linear_attn.dt_bias"
    skip: str = "mamba.D"  # whole
    selection: str = "mamba.x_proj"  # what steps, keys and queries are made of
    steps: str = "mamba.dt_proj"
    selection_norms: tuple[str, str, str] = ("mamba.dt_layernorm", "mamba.b_layernorm", "mamba.c_layernorm")
    mixer_norm: str = "linear_attn.norm"
    mixer_out: str = "linear_attn.out_proj"

    # Of vectors for each layer, and of what a layer does with its own.
    layer_inputs: str = "model.embed_tokens_per_layer"
    layer_inputs_projection: str = "model.per_layer_model_projection"
    layer_inputs_norm: str = "model.per_layer_projection_norm"
    input_gate: str = "per_layer_input_gate"
    input_projection: str = "per_layer_projection"
    input_norm: str = "post_per_layer_input_norm"
    layer_scale: str = "layer_scalar"  # whole

    # Of streams of hidden rows, with a number behind the first two, and of augmented residuals.
    stream_spreading: str = "model.altup_projections"
    stream_joining: str = "model.altup_unembed_projections"
    stream_router: str = "altup.modality_router"
    stream_router_norm: str = "altup.router_norm"
    stream_predictions: str = "altup.prediction_coefs"
    stream_corrections: str = "altup.correction_coefs"
    stream_scale: str = "altup.correct_output_scale"  # whole
    laurel_left: str = "laurel.linear_left"
    laurel_right: str = "laurel.linear_right"
    laurel_norm: str = "laurel.post_laurel_norm"

    # Of a block that layers share, whose other names are attention's, the norm's before an MLP, and the MLP's. Adapters
    # have the number of the layer's block for "{expert}".
    shared_norm: str = "shared_transformer.input_layernorm"
    shared_last: str = "linear"
    qkv_adapters: tuple[str, ...] = ()
    gate_up_adapters: tuple[str, ...] = ()

    gate_up: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj")  # without a gate, the last
    down: str = "mlp.down_proj"
    activation: str = "mlp.act_fn"

    router: str = "mlp.gate"
    # Of what a router reads in place of rows: the first product, a norm and two more products.
    router_mlp: tuple[str, ...] = (
        "mlp.gate.down_proj", "mlp.gate.router_mlp.norm", "mlp.gate.router_mlp.fc1", "mlp.gate.router_mlp.fc2",
    )  # fmt: skip
    router_states: str = "mlp.gate.router_states_scale"  # whole
    router_bias: str = "mlp.gate.bias"  # whole
    router_scale: str = "router.scale"  # whole
    expert_scales: str = "router.per_expert_scale"  # whole
    correction: str = "mlp.gate.e_score_correction_bias"  # whole, as it has no suffix
    correction_dimensions: int = 1  # those before the last are ones
    # Routers have inputs before outputs, and corrections a second row, for images (ERNIE 4.5 VL).
    routers_see: bool = False
    # Of each expert, or without "{expert}" one tensor of all.
    expert_gate_up: tuple[str, ...] = ("mlp.experts.{expert}.gate_proj", "mlp.experts.{expert}.up_proj")
    expert_down: str = "mlp.experts.{expert}.down_proj"
    latent_in: str = "mixer.fc1_latent_proj"
    latent_out: str = "mixer.fc2_latent_proj"
    expert_suffix: str = ".weight"  # of these
    expert_gate_up_bias: str = "mlp.experts.gate_up_proj_bias"  # of all, whole
    expert_down_bias: str = "mlp.experts.down_proj_bias"
    # How the tensors of all experts lie: outputs before inputs; inputs first, perhaps with each number of a gate beside
    # its up; or all experts' numbers in one dimension, of down as of gate and up.
    experts_lie: Literal["by_rows", "by_columns", "by_neighbours", "flat"] = "by_rows"
    # The tensors of all experts may have inputs before outputs, as their shapes say.
    experts_by_columns: bool = False
    # Of experts beside a dense MLP: norms behind the MLP, and before and behind the experts.
    after_dense: str = "post_feedforward_layernorm_1"
    before_experts: str = "pre_feedforward_layernorm_2"
    after_experts: str = "post_feedforward_layernorm_2"
    shared_gate_up: tuple[str, ...] = ("mlp.shared_experts.gate_proj", "mlp.shared_experts.up_proj")
    shared_down: str = "mlp.shared_experts.down_proj"
    shared_gate: str = "mlp.shared_expert_gate"

    # Regular expressions of whole names that are not read: buffers that are computed and were stored by older
    # writers, and modules that predict more tokens. Those that stand behind the layers, as DeepSeek-V3's and GLM-4.5's,
    # are known by `joining`, which no layer has.
    ignored: tuple[str, ...] = (r"(.*\.)?(rotary_emb\.inv_freq|position_ids|masked_bias)", r"(model\.)?mtp(_\w+)?\..*")
    joining: str = "eh_proj.weight"

    @property
    def of_body(self) -> tuple[str, ...]:
        """Names below the body, which is what the head reads."""
        inputs = self.layer_inputs, self.layer_inputs_projection, self.layer_inputs_norm
        own = self.embedding, self.embedding_norm, self.positions, self.final_norm, self.layer
        return *own, *inputs, self.stream_spreading, self.stream_joining

    def published_number(self, layer: int) -> int:
        """What number a layer has where it is published."""
        return self.numbers[layer] if self.numbers else layer

    def in_layer(self, name: str, layer: int, expert: int = 0) -> str:
        """The whole name of what `name` is in a layer."""
        number = self.published_number(layer)
        return (self.layer + name).format(layer=number, half=layer % 2, expert=expert)
