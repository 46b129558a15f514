//! The bench's figures for people and for programs.

use serde_json::{Map, Value, json};

use super::case::Row;
use super::policy::Policy;

fn round(value: f64, digits: i32) -> f64 {
    let scale = 10_f64.powi(digits);
    (value * scale).round() / scale
}

/// One object: workloads with their policies, and Fovea's smallest reuse by the oracle's.
pub fn json(rows: &[Row]) -> Value {
    let workloads: Vec<Value> = rows
        .iter()
        .map(|row| {
            json!({
                "name": row.case.name,
                "workers": row.case.workers,
                "cache": row.case.cache,
                "policies": policies(row),
            })
        })
        .collect();
    json!({"workloads": workloads, "min_reuse_over_oracle": round(min_reuse(rows), 4)})
}

fn policies(row: &Row) -> Map<String, Value> {
    let one = |policy: &Policy| {
        let figures = row.figures[policy];
        let value = json!({
            "reuse_over_oracle": round(row.reuse_over_oracle[policy], 4),
            "ttft_ms_p50": round(figures.ttft_ms_p50, 1),
            "ttft_ms_p90": round(figures.ttft_ms_p90, 1),
            "imbalance": round(figures.imbalance, 3),
            "hot_workers": figures.hot_workers,
            "utilisation": round(figures.utilisation, 3),
        });
        (policy.name().to_owned(), value)
    };
    row.figures.keys().map(one).collect()
}

/// Fovea's, over all rows.
pub fn min_reuse(rows: &[Row]) -> f64 {
    rows.iter().filter_map(|row| row.reuse_over_oracle.get(&Policy::Fovea)).copied().fold(1.0, f64::min)
}

/// Fovea's TTFT p90 by that of the best policy, those left out that see true queues.
pub fn over_best(row: &Row) -> f64 {
    let knows_all = |policy: &Policy| matches!(policy, Policy::Oracle | Policy::TrueLoad);
    let best = row.figures.iter().filter(|(policy, _)| !knows_all(policy)).map(|(_, f)| f.ttft_ms_p90);
    let best = best.fold(f64::INFINITY, f64::min);
    row.figures.get(&Policy::Fovea).map_or(1.0, |figures| figures.ttft_ms_p90 / best)
}

/// The table as a page of documentation.
pub fn page(rows: &[Row]) -> String {
    format!(
        "# Simulated fleet\n\nWritten by `tests/bench.sh fleet --plots`; `docs/operate/choice.md` says what it means.\n\n{}",
        markdown(rows)
    )
}

/// A Markdown table: for each case and policy reuse, TTFT and imbalance.
pub fn markdown(rows: &[Row]) -> String {
    let mut text = String::from(
        "| workload | workers | cache | policy | reuse / oracle's | TTFT p50 ms | TTFT p90 ms | max / mean tokens | photo on workers |\n|---|---|---|---|---|---|---|---|---|\n",
    );
    for row in rows {
        for (policy, figures) in &row.figures {
            let hot = if row.case.name == "photo" { figures.hot_workers.to_string() } else { String::new() };
            text += &format!(
                "| {} | {} | {} | {} | {:.3} | {:.0} | {:.0} | {:.2} | {hot} |\n",
                row.case.name,
                row.case.workers,
                row.case.cache.name(),
                policy.name(),
                row.reuse_over_oracle[policy],
                figures.ttft_ms_p50,
                figures.ttft_ms_p90,
                figures.imbalance,
            );
        }
    }
    text
}

/// One line per case: reuse by the oracle's and TTFT p90 of every policy, and where Fovea stands against the best.
pub fn table(rows: &[Row]) -> String {
    let mut text = format!("{:<15}{:>4} {:<7}", "workload", "n", "cache");
    for policy in Policy::ALL {
        text += &format!("{:>20}", policy.name());
    }
    text += &format!("{:>11}{:>8}{:>5}\n", "p90/best", "imbal", "hot");
    for row in rows {
        text += &format!("{:<15}{:>4} {:<7}", row.case.name, row.case.workers, row.case.cache.name());
        for policy in Policy::ALL {
            let cell = row
                .figures
                .get(&policy)
                .map(|figures| format!("{:.3} {:>7.0} ms", row.reuse_over_oracle[&policy], figures.ttft_ms_p90));
            text += &format!("{:>20}", cell.unwrap_or_default());
        }
        let fovea = row.figures.get(&Policy::Fovea).copied().unwrap_or_default();
        text += &format!("{:>11.3}{:>8.2}{:>5.0}\n", over_best(row), fovea.imbalance, fovea.hot_workers);
    }
    text += &format!("reuse / oracle's and TTFT p90; smallest reuse / oracle's of fovea: {:.3}\n", min_reuse(rows));
    text
}
