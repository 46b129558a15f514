//! Memory and file descriptors of the programs that live all through, once a second.

use std::fmt::Write as _;
use std::sync::atomic::Ordering;
use std::time::Duration;

use anyhow::Context;
use e2e::Fleet;
use tokio::time::{Instant, interval};

use super::Totals;
use super::load::Tally;

const NAMES: [&str; 2] = ["balancer", "sidecar"];
const EVERY: Duration = Duration::from_secs(1);

/// One look at a program.
#[derive(Clone, Copy, Debug)]
pub struct Sample {
    pub rss_kib: u64,
    pub fds: u64,
}

pub struct Watcher {
    pids: [u32; 2],
}

impl Watcher {
    pub fn new(fleet: &Fleet) -> anyhow::Result<Self> {
        let pid = |program: &e2e::Program| program.pid().context("the program has ended");
        Ok(Self { pids: [pid(&fleet.balancer)?, pid(&fleet.sidecars[0])?] })
    }

    pub async fn watch(self, until: Instant) -> anyhow::Result<Vec<[Sample; 2]>> {
        let (mut samples, mut tick) = (Vec::new(), interval(EVERY));
        while Instant::now() < until {
            tick.tick().await;
            samples.push([look(self.pids[0])?, look(self.pids[1])?]);
        }
        Ok(samples)
    }
}

fn look(pid: u32) -> anyhow::Result<Sample> {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status"))?;
    let rss = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
    let rss_kib = rss.and_then(|rest| rest.trim().strip_suffix("kB")?.trim().parse().ok()).context("no VmRSS")?;
    Ok(Sample { rss_kib, fds: std::fs::read_dir(format!("/proc/{pid}/fd"))?.count() as u64 })
}

/// What a run showed.
#[derive(Debug)]
pub struct Found {
    pub totals: Totals,
    samples: Vec<[Sample; 2]>,
}

impl Found {
    pub fn new(samples: Vec<[Sample; 2]>, tally: &Tally) -> Self {
        let read = |counter: &std::sync::atomic::AtomicU64| counter.load(Ordering::Relaxed);
        let growth = |program: usize| growth(&samples, program);
        let (balancer, sidecar) = (growth(0), growth(1));
        let totals = Totals {
            requests: read(&tally.requests),
            errors: read(&tally.errors),
            cut: read(&tally.cut),
            left: read(&tally.left),
            kills: read(&tally.kills),
            rss_growth_ratio: (balancer.0.max(sidecar.0) * 1000.0).round() / 1000.0,
            fd_growth: balancer.1.max(sidecar.1),
        };
        Self { totals, samples }
    }

    /// Lines over time as SVG: memory in MiB, file descriptors.
    pub fn chart(&self) -> String {
        let mut svg = String::from(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 720 360\" font-family=\"sans-serif\" font-size=\"12\">\n\
             <rect width=\"720\" height=\"360\" fill=\"white\"/>\n",
        );
        let rss = |sample: &Sample| mib(sample.rss_kib);
        let fds = |sample: &Sample| ratio(sample.fds);
        self.panel(&mut svg, 20.0, "memory, MiB", rss);
        self.panel(&mut svg, 190.0, "file descriptors", fds);
        svg.push_str("</svg>\n");
        svg
    }

    fn panel(&self, svg: &mut String, top: f64, title: &str, value: impl Fn(&Sample) -> f64) {
        let most = self.samples.iter().flatten().map(&value).fold(1.0, f64::max);
        let minutes = ratio(self.samples.len() as u64) / 60.0;
        let _ =
            writeln!(svg, "<text x=\"50\" y=\"{}\">{title} (0 to {most:.0}), {minutes:.1} minutes</text>", top + 10.0);
        let _ = writeln!(svg, "<path d=\"M50 {}V{}H700\" fill=\"none\" stroke=\"#888\"/>", top + 18.0, top + 140.0);
        for (program, colour) in ["#1f6feb", "#d1551e"].into_iter().enumerate() {
            let mut path = String::new();
            for (at, sample) in self.samples.iter().enumerate() {
                let x = 50.0 + 650.0 * ratio(at as u64) / ratio(self.samples.len() as u64);
                let y = top + 140.0 - 120.0 * value(&sample[program]) / most;
                let _ = write!(path, "{}{x:.1} {y:.1}", if at == 0 { 'M' } else { 'L' });
            }
            let _ = writeln!(svg, "<path d=\"{path}\" fill=\"none\" stroke=\"{colour}\"/>");
            let x = 560.0 + 70.0 * ratio(program as u64);
            let _ = writeln!(svg, "<text x=\"{x}\" y=\"{}\" fill=\"{colour}\">{}</text>", top + 10.0, NAMES[program]);
        }
    }
}

/// Last tenth against the third: memory as the ratio of means, descriptors as the difference of the least, which a leak raises and a burst does not.
fn growth(samples: &[[Sample; 2]], program: usize) -> (f64, i64) {
    let tenth = samples.len() / 10;
    let part = |at: usize| samples.iter().skip(at * tenth).take(tenth.max(1)).map(move |sample| sample[program]);
    let mean = |at| ratio(part(at).map(|sample| sample.rss_kib).sum()) / ratio(tenth.max(1) as u64);
    let least = |at| part(at).map(|sample| sample.fds).min().unwrap_or(0).cast_signed();
    (mean(9) / f64::max(mean(2), 1.0), least(9) - least(2))
}

fn mib(kib: u64) -> f64 {
    ratio(kib) / 1024.0
}

#[expect(clippy::cast_precision_loss, reason = "far below 2^53")]
fn ratio(count: u64) -> f64 {
    count as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn growth_compares_the_last_tenth_with_the_third() {
        let samples: Vec<[Sample; 2]> = (0..100u64)
            .map(|at| [Sample { rss_kib: if at < 90 { 1000 } else { 1500 }, fds: 10 + at / 90 }; 2])
            .collect();
        let (rss, fds) = growth(&samples, 0);
        assert!((rss - 1.5).abs() < 1e-9 && fds == 1, "{rss} {fds}");
    }
}
