//! `/metrics` with vLLM's names and labels: a series per rank, `engine="r"`.

use crate::engine::{Engine, lock};
use crate::scheduler::Counts;
use std::fmt::Write;

/// One rank's figures.
#[derive(Default)]
pub(super) struct Figures {
    pub(super) counts: Counts,
    /// Blocks held by requests.
    pub(super) in_use: usize,
    /// Blocks that requests can use.
    pub(super) usable: usize,
    pub(super) asleep: bool,
}

/// Of every rank, in order.
pub(super) fn figures(engine: &Engine) -> Vec<Figures> {
    let look = |scheduler: &crate::scheduler::Scheduler| Figures {
        counts: scheduler.counts(),
        in_use: scheduler.cache().in_use(),
        usable: scheduler.cache().usable(),
        asleep: scheduler.is_asleep(),
    };
    engine.ranks.iter().map(|rank| rank.inspect(look)).collect()
}

#[expect(clippy::cast_precision_loss, reason = "counters stay far below 2^53")]
pub(super) fn float(n: u64) -> f64 {
    n as f64
}

pub(super) fn render(engine: &Engine) -> String {
    let figures = figures(engine);
    let (mm_queries, mm_hits) = {
        let media = lock(&engine.media);
        (media.queries, media.hits)
    };
    // The processor cache stands before all ranks; its counts are shown as rank 0's.
    let shared = |rank: usize, n: u64| if rank == 0 { float(n) } else { 0.0 };
    let model = &engine.config.model_name;
    let mut out = String::new();
    let mut family = |name: &str, kind: &str, more: &str, value: &dyn Fn(usize, &Figures) -> f64| {
        // Writing to a String cannot fail.
        let base = name.strip_suffix("_total").unwrap_or(name);
        let _ = writeln!(out, "# HELP vllm:{name} vLLM's {base}.\n# TYPE vllm:{name} {kind}");
        for (rank, figures) in figures.iter().enumerate() {
            let value = value(rank, figures);
            let _ = writeln!(out, "vllm:{name}{{engine=\"{rank}\",model_name=\"{model}\"{more}}} {value:?}");
        }
    };
    let usage = |_: usize, f: &Figures| float(f.in_use as u64) / float(f.usable as u64);
    family("num_requests_running", "gauge", "", &|_, f| float(f.counts.running as u64));
    family("num_requests_waiting", "gauge", "", &|_, f| float(f.counts.waiting as u64));
    family("kv_cache_usage_perc", "gauge", "", &usage);
    family("engine_sleep_state", "gauge", ",sleep_state=\"awake\"", &|_, f| f64::from(u8::from(!f.asleep)));
    family("prefix_cache_queries_total", "counter", "", &|_, f| float(f.counts.prompt_tokens));
    family("prefix_cache_hits_total", "counter", "", &|_, f| float(f.counts.cached_tokens));
    family("mm_cache_queries_total", "counter", "", &|rank, _| shared(rank, mm_queries));
    family("mm_cache_hits_total", "counter", "", &|rank, _| shared(rank, mm_hits));
    family("num_preemptions_total", "counter", "", &|_, f| float(f.counts.preemptions));
    family("prompt_tokens_total", "counter", "", &|_, f| float(f.counts.prompt_tokens));
    family("prompt_tokens_cached_total", "counter", "", &|_, f| float(f.counts.cached_tokens));
    family("generation_tokens_total", "counter", "", &|_, f| float(f.counts.generated_tokens));
    family("request_success_total", "counter", ",finished_reason=\"length\"", &|_, f| float(f.counts.served));
    cache_config(engine, &mut out);
    out
}

fn cache_config(engine: &Engine, out: &mut String) {
    let config = &engine.config;
    let (size, blocks) = (config.block_size, config.blocks);
    out.push_str("# HELP vllm:cache_config_info Information of the LLMEngine CacheConfig\n");
    out.push_str("# TYPE vllm:cache_config_info gauge\n");
    for rank in 0..engine.ranks.len() {
        let _ = writeln!(
            out,
            "vllm:cache_config_info{{block_size=\"{size}\",cache_dtype=\"auto\",enable_prefix_caching=\"True\",\
             engine=\"{rank}\",hash_block_size=\"None\",kv_cache_size_tokens=\"{}\",num_gpu_blocks=\"{blocks}\",\
             prefix_caching_hash_algo=\"{}\",prefix_match_unit=\"None\",sliding_window=\"None\"}} 1.0",
            size * blocks,
            config.hash_algo.name(),
        );
    }
}
