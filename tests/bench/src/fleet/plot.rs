//! Bar charts as SVG, written by hand: one panel per fleet size, one group per workload, one bar per policy.

use std::fmt::Write as _;

use super::case::{Cache, Row};
use super::policy::Policy;

const WIDTH: f64 = 1100.0;
const PANEL: f64 = 210.0;
const LEFT: f64 = 60.0;
const TOP: f64 = 60.0;
const BARS: f64 = 140.0;

fn colour(policy: Policy) -> &'static str {
    match policy {
        Policy::RoundRobin => "#bbbbbb",
        Policy::Session => "#ccbb44",
        Policy::LeastLoaded => "#66ccee",
        Policy::Approximate => "#4477aa",
        Policy::Fovea => "#228833",
        Policy::TrueLoad => "#aa3377",
        Policy::Oracle => "#222222",
    }
}

/// What is drawn.
pub struct Chart {
    pub title: &'static str,
    /// Value at the top of the axis; larger ones are cut there.
    pub most: f64,
    pub value: fn(&Row, Policy) -> Option<f64>,
}

/// Name and content of every chart.
pub fn all(rows: &[Row]) -> Vec<(String, String)> {
    let charts = [
        (
            "reuse",
            Chart {
                title: "Reused prompt tokens / the oracle's",
                most: 1.5,
                value: |row, policy| row.reuse_over_oracle.get(&policy).copied(),
            },
        ),
        (
            "ttft",
            Chart {
                title: "TTFT p90 / the oracle's (cut at 5)",
                most: 5.0,
                value: |row, policy| {
                    Some(row.figures.get(&policy)?.ttft_ms_p90 / row.figures.get(&Policy::Oracle)?.ttft_ms_p90)
                },
            },
        ),
        (
            "imbalance",
            Chart {
                title: "Computed tokens per worker, max / mean",
                most: 2.5,
                value: |row, policy| Some(row.figures.get(&policy)?.imbalance),
            },
        ),
    ];
    let drawn = |cache: Cache| {
        let rows: Vec<&Row> = rows.iter().filter(|row| row.case.cache == cache).collect();
        charts.iter().map(move |(name, chart)| (format!("fleet-{name}-{}.svg", cache.name()), svg(&rows, chart, cache)))
    };
    drawn(Cache::Scarce).chain(drawn(Cache::Ample)).collect()
}

fn svg(rows: &[&Row], chart: &Chart, cache: Cache) -> String {
    let mut sizes: Vec<usize> = rows.iter().map(|row| row.case.workers).collect();
    sizes.sort_unstable();
    sizes.dedup();
    let height = TOP + PANEL * sizes.len() as f64;
    let mut out = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {height}\" font-family=\"sans-serif\" font-size=\"11\">\n<rect width=\"{WIDTH}\" height=\"{height}\" fill=\"#ffffff\"/>\n<text x=\"{LEFT}\" y=\"20\" font-size=\"15\">{}, {} cache</text>\n",
        chart.title,
        cache.name()
    );
    let mut x = LEFT;
    for policy in Policy::ALL {
        let _ = writeln!(
            out,
            "<rect x=\"{x}\" y=\"30\" width=\"10\" height=\"10\" fill=\"{}\"/><text x=\"{}\" y=\"39\">{}</text>",
            colour(policy),
            x + 14.0,
            policy.name()
        );
        x += 110.0;
    }
    for (place, workers) in sizes.iter().enumerate() {
        let rows: Vec<&Row> = rows.iter().copied().filter(|row| row.case.workers == *workers).collect();
        panel(&mut out, &rows, chart, TOP + PANEL * place as f64);
    }
    out + "</svg>\n"
}

fn panel(out: &mut String, rows: &[&Row], chart: &Chart, top: f64) {
    let base = top + 20.0 + BARS;
    let workers = rows.first().map_or(0, |row| row.case.workers);
    let _ = writeln!(out, "<text x=\"{LEFT}\" y=\"{}\">{workers} workers</text>", top + 12.0);
    for step in 0..=4 {
        let value = chart.most * f64::from(step) / 4.0;
        let y = base - BARS * f64::from(step) / 4.0;
        let _ = writeln!(
            out,
            "<line x1=\"{LEFT}\" x2=\"{}\" y1=\"{y:.1}\" y2=\"{y:.1}\" stroke=\"#dddddd\"/><text x=\"{}\" y=\"{:.1}\" text-anchor=\"end\">{value:.2}</text>",
            WIDTH - 10.0,
            LEFT - 5.0,
            y + 4.0
        );
    }
    let group = (WIDTH - LEFT - 10.0) / rows.len().max(1) as f64;
    let bar = group * 0.85 / Policy::ALL.len() as f64;
    for (at, row) in rows.iter().enumerate() {
        let left = LEFT + group * at as f64 + group * 0.07;
        for (place, policy) in Policy::ALL.into_iter().enumerate() {
            let Some(value) = (chart.value)(row, policy) else { continue };
            let tall = BARS * (value / chart.most).clamp(0.0, 1.0);
            let _ = writeln!(
                out,
                "<rect x=\"{:.1}\" y=\"{:.1}\" width=\"{:.1}\" height=\"{tall:.1}\" fill=\"{}\"><title>{} {}: {value:.3}</title></rect>",
                left + bar * place as f64,
                base - tall,
                bar * 0.9,
                colour(policy),
                row.case.name,
                policy.name()
            );
        }
        let _ = writeln!(out, "<text x=\"{left:.1}\" y=\"{:.1}\">{}</text>", base + 14.0, row.case.name);
    }
}
