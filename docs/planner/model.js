/**
 * The cost model, for the page "Plan a run": formulas only, no page.
 *
 * notebooks/lesson/cost_model.py has most of the functions under the same names, explains them and
 * names their sources. tests/test_planner.py compares the two. Units: bytes, seconds, bytes a second.
 *
 * It is a classic script and no module, because a browser does not load modules from a file:// URL.
 */
const costModel = (() => {
  /** Bytes of a number: in memory, when FSDP2 gathers weights, when gradients are averaged. */
  const PRECISIONS = {
    fp32: { weights: 4, gathered: 4, reduced: 4 },
    "bf16 autocast": { weights: 4, gathered: 2, reduced: 4 },
    "bf16 autocast, reduce in bf16": { weights: 4, gathered: 2, reduced: 2 },
    "all bf16": { weights: 2, gathered: 2, reduced: 2 },
  };
  /** Numbers of state for each parameter. */
  const OPTIMIZERS = { SGD: 0, momentum: 1, Adam: 2 };
  const STRATEGIES = ["DDP", "DDP, bucket view", "ZeRO-1", "ZeRO-2", "FSDP2"];

  /** Bytes a second of a network that is sold in gigabits a second. */
  const bytes_per_second = (gigabits) => (gigabits * 1e9) / 8;

  /** Bytes of gradients that DDP reduces in a step. */
  const gradient_bytes = (parameters, bytes_per_number = 4) => parameters * bytes_per_number;

  /** Steps of a ring all-reduce. */
  const ring_steps = (world_size) => 2 * (world_size - 1);

  /** Bytes that each rank sends to all-reduce a payload. */
  const bytes_sent = (payload, world_size) => (ring_steps(world_size) * payload) / world_size;

  /** Seconds of one all-reduce: latency, and the bytes over the bandwidth. */
  const all_reduce_seconds = (payload, world_size, bandwidth, latency = 0) =>
    latency + bytes_sent(payload, world_size) / bandwidth;

  /**
   * Bandwidth of a ring over all GPUs: that of its slowest link, because all ranks send at the same
   * pace. NCCL's trees, and rings over several network cards, do better or worse.
   * @param {number} within out of a GPU, to another GPU of its node
   * @param {number} between out of a node, all its network cards together
   */
  const ring_bandwidth = (gpus_per_node, nodes, within, between) => {
    if (nodes === 1) return within;
    return gpus_per_node === 1 ? between : Math.min(within, between);
  };

  /** Buckets that DDP makes of a payload. */
  const bucket_count = (payload, bucket_bytes) => Math.max(1, Math.ceil(payload / bucket_bytes));

  /** Seconds of the all-reduces of all buckets: each pays the latency. */
  const bucketed_all_reduce_seconds = (payload, buckets, world_size, bandwidth, latency = 0) =>
    buckets * all_reduce_seconds(payload / buckets, world_size, bandwidth, latency);

  /** Seconds of the all-reduces that come after backward has ended. */
  const exposed_seconds = (all_reduce, backward, buckets) =>
    Math.max(all_reduce / buckets, backward / buckets + all_reduce - backward);

  /**
   * When a bucket (from 1) is ready, and when its all-reduce starts and ends. The buckets follow
   * each other without a gap, unless the network has to wait for backward.
   * @returns {[number, number, number]} seconds since the start of backward
   */
  const bucket_span = (number, all_reduce, backward, buckets) => {
    const one = all_reduce / buckets, first = backward / buckets;
    const ready = number * first;
    const start = Math.max(ready, first + (number - 1) * one);
    return [ready, start, start + one];
  };

  /** The share of a step that computes. */
  const efficiency = (compute, exposed) => compute / (compute + exposed);

  /** Bandwidth at which an all-reduce takes as long as backward. */
  const break_even_bandwidth = (payload, world_size, backward) =>
    bytes_sent(payload, world_size) / backward;

  /**
   * A step of DDP.
   * @param {number} forward seconds of forward and the optimizer's step
   * @returns {{buckets, all_reduce, exposed, seconds, efficiency}}
   */
  const predict_step = (
    forward, backward, payload, bucket_bytes, world_size, bandwidth, latency = 0,
  ) => {
    const buckets = bucket_count(payload, bucket_bytes);
    const all_reduce =
      bucketed_all_reduce_seconds(payload, buckets, world_size, bandwidth, latency);
    const exposed = exposed_seconds(all_reduce, backward, buckets);
    const compute = forward + backward;
    return {
      buckets, all_reduce, exposed,
      seconds: compute + exposed,
      efficiency: efficiency(compute, exposed),
    };
  };

  /**
   * What a rank holds between two steps, in bytes per parameter.
   * @param {number} number bytes of a weight
   * @param {number} state numbers that the optimizer keeps for each parameter
   * @returns {{weights, gradients, buckets, optimizer}}
   */
  const bytes_per_parameter = (strategy, world_size, number = 4, state = 2) => {
    const sharded = Math.max(0, STRATEGIES.indexOf(strategy) - 1);
    const divided = ["optimizer", "gradients", "weights"].slice(0, sharded);
    const share = (kind, bytes) => (divided.includes(kind) ? bytes / world_size : bytes);
    return {
      weights: share("weights", number),
      gradients: share("gradients", number),
      buckets: strategy === "DDP" ? number : 0,
      optimizer: share("optimizer", number * state),
    };
  };

  /** Bytes that each rank sends in a step; precision is one of PRECISIONS. */
  const strategy_bytes_sent = (strategy, parameters, world_size, precision) => {
    const { weights, gathered, reduced } = precision;
    const per_parameter = {
      "ZeRO-1": 2 * reduced + weights,
      "ZeRO-2": reduced + weights,
      FSDP2: 2 * gathered + reduced,
    }[strategy] ?? 2 * reduced;
    return ((world_size - 1) / world_size) * per_parameter * parameters;
  };

  return {
    PRECISIONS, OPTIMIZERS, STRATEGIES,
    bytes_per_second, gradient_bytes, ring_steps, bytes_sent, all_reduce_seconds, ring_bandwidth,
    bucket_count, bucketed_all_reduce_seconds, exposed_seconds, bucket_span, efficiency,
    break_even_bandwidth, predict_step, bytes_per_parameter, strategy_bytes_sent,
  };
})();
