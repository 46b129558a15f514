//! Tables for people.

use crate::measure::{Comparison, Repeat};

/// The comparison as a table, policies in the order given.
pub fn table(order: &[(&'static str, &str)], comparison: &Comparison) -> String {
    let mut text = format!(
        "{:<20}{:>14}{:>13}{:>13}   {}\n",
        "policy", "reused tokens", "TTFT p50", "TTFT p90", "requests per worker"
    );
    for (key, title) in order {
        let Some(figures) = comparison.get(key) else { continue };
        let per_worker: Vec<String> = figures.requests_per_worker.iter().map(u64::to_string).collect();
        text += &format!(
            "{title:<20}{:>13.1}%{:>10.1} ms{:>10.1} ms   {}\n",
            figures.reused_tokens_ratio * 100.0,
            figures.ttft_ms_p50,
            figures.ttft_ms_p90,
            per_worker.join(" / ")
        );
    }
    text
}

/// One sentence on the repeated request.
pub fn repeat(repeat: &Repeat) -> String {
    let place = if repeat.same_worker { "the same worker" } else { "another worker" };
    format!(
        "One request with 4 pictures, sent twice: {} of {} blocks were known to be cached, on {place}.",
        repeat.overlap_blocks, repeat.prompt_blocks
    )
}
