//! Figures of one case, and medians over seeds.

use super::simulation::Ended;

/// Requests of the start that fill the caches and are not counted.
const WARM_UP: f64 = 0.2;

/// What the requests after the warm-up say.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Figures {
    pub reused_tokens: f64,
    pub ttft_ms_p50: f64,
    pub ttft_ms_p90: f64,
    /// Largest number of tokens that one worker computed, by the mean.
    pub imbalance: f64,
    pub hot_workers: f64,
    pub utilisation: f64,
}

impl Figures {
    pub fn of(ended: &Ended, workers: usize) -> Self {
        let skipped = (ended.outcomes.len() as f64 * WARM_UP) as usize;
        let counted = &ended.outcomes[skipped..];
        let mut waits: Vec<f64> = Vec::with_capacity(counted.len());
        let mut computed = vec![0.0; workers];
        let mut reused = 0.0;
        for outcome in counted {
            let first = outcome.first_byte.unwrap_or(u64::MAX);
            waits.push((first - outcome.arrived) as f64 / 1e3);
            computed[outcome.worker] += outcome.work.computed as f64;
            reused += outcome.work.reused as f64;
        }
        waits.sort_by(f64::total_cmp);
        let mean = computed.iter().sum::<f64>() / workers as f64;
        Self {
            reused_tokens: reused,
            ttft_ms_p50: quantile(&waits, 0.5),
            ttft_ms_p90: quantile(&waits, 0.9),
            imbalance: computed.iter().copied().fold(0.0, f64::max) / mean.max(1.0),
            hot_workers: ended.hot_workers as f64,
            utilisation: ended.utilisation,
        }
    }

    /// Median of each figure by itself.
    pub fn median(all: &[Self]) -> Self {
        let of = |figure: fn(&Self) -> f64| {
            let mut values: Vec<f64> = all.iter().map(figure).collect();
            values.sort_by(f64::total_cmp);
            quantile(&values, 0.5)
        };
        Self {
            reused_tokens: of(|figures| figures.reused_tokens),
            ttft_ms_p50: of(|figures| figures.ttft_ms_p50),
            ttft_ms_p90: of(|figures| figures.ttft_ms_p90),
            imbalance: of(|figures| figures.imbalance),
            hot_workers: of(|figures| figures.hot_workers),
            utilisation: of(|figures| figures.utilisation),
        }
    }
}

/// Of sorted values; 0 for none.
pub fn quantile(sorted: &[f64], share: f64) -> f64 {
    let last = sorted.len().saturating_sub(1);
    sorted.get((last as f64 * share).round() as usize).copied().unwrap_or(0.0)
}
