//! Our index beside its peers, in one process and one run. Last line of stdout: the figures as JSON.

mod exact;
mod hashing;
mod measure;
mod memory;
mod subject;
mod workload;

use clap::Parser;
use dynamo_kv_router::indexer::concurrent_radix_tree_compressed::ConcurrentRadixTreeCompressed;
use dynamo_kv_router::indexer::positional::PositionalIndexer;
use serde_json::{Map, Value, json};

use measure::Figures;
use subject::{Chain, Ours, Pooled, Radix, Subject};
use workload::{CLASSES, Workload};

#[global_allocator]
static ALLOCATOR: memory::Counting = memory::Counting;

const UPDATES: [&str; 3] = ["store64", "decode1", "head_churn"];

#[derive(Parser)]
struct Args {
    /// Show the case of three events for each index, and nothing else.
    #[arg(long)]
    exact: bool,
    /// Blocks per worker of the case with 1000 workers; 50000 need 3 GB.
    #[arg(long, default_value_t = 50_000)]
    large: usize,
    #[arg(long, default_value_t = 5)]
    rounds: usize,
}

type Crtc = Pooled<ConcurrentRadixTreeCompressed>;
type Positional = Pooled<PositionalIndexer>;

/// One index through all phases.
struct Lane<S: Subject> {
    subject: S,
    figures: Figures,
}

impl<S: Subject> Lane<S> {
    fn new(load: &Workload) -> Self {
        let mut figures = Figures::default();
        let mut subject = measure::store::<S>(load, &mut figures);
        let wrong = measure::wrong(&mut subject, load);
        eprintln!("{}: stored, {wrong} wrong answers", S::NAME);
        Self { subject, figures }
    }

    fn queries(&mut self, load: &Workload, round: usize) {
        measure::queries(&mut self.subject, load, &mut self.figures, round);
    }

    fn updates(&mut self, load: &Workload, round: usize) {
        // Two more fillings: the best of three counts.
        if round > 0 && round < 3 {
            drop(measure::store::<S>(load, &mut self.figures));
        }
        measure::decode(&mut self.subject, load, &mut self.figures, round);
        measure::head_churn(&mut self.subject, load, &mut self.figures);
    }

    fn json(&mut self) -> Value {
        let figures = &mut self.figures;
        let mut lookups = Map::new();
        for class in &CLASSES {
            let p50 = figures.percentile_us(class.name, 50);
            lookups.insert(class.name.to_owned(), json!({ "p50": p50, "p99": figures.percentile_us(class.name, 99) }));
        }
        json!({ "lookup_us": lookups, "updates_per_s": figures.updates_per_s, "bytes_per_block": figures.bytes_per_block })
    }
}

fn exact() {
    let cases = [
        exact::case::<Ours>(),
        exact::case::<Radix>(),
        exact::case::<Crtc>(),
        exact::case::<Positional>(),
        exact::case::<Chain>(),
    ];
    for case in &cases {
        eprintln!("{case}");
    }
    println!("{}", json!({ "exact": cases }));
}

/// Each index alone in memory, one after another.
fn large<S: Subject>(load: &Workload, rounds: usize) -> Value {
    let mut lane = Lane::<S>::new(load);
    (0..rounds).for_each(|round| lane.queries(load, round));
    lane.json()
}

fn p50(of: &Value, class: &str) -> f64 {
    of["lookup_us"][class]["p50"].as_f64().unwrap_or(f64::NAN)
}

fn rate(of: &Value, kind: &str) -> f64 {
    of["updates_per_s"][kind].as_f64().unwrap_or(f64::NAN)
}

/// What `of` says of each name.
fn each<'a>(names: impl IntoIterator<Item = &'a str>, of: impl Fn(&str) -> f64) -> Value {
    names.into_iter().map(|name| (name.to_owned(), json!(of(name)))).collect::<Map<_, _>>().into()
}

fn classes() -> impl Iterator<Item = &'static str> {
    CLASSES.iter().map(|class| class.name)
}

/// Our median by the fastest peer's.
fn ratios(ours: &Value, peers: &[Value]) -> Value {
    each(classes(), |class| p50(ours, class) / peers.iter().map(|peer| p50(peer, class)).fold(f64::INFINITY, f64::min))
}

fn named<const N: usize>(names: [&str; N], values: [Value; N]) -> Value {
    names.into_iter().map(str::to_owned).zip(values).collect::<Map<_, _>>().into()
}

fn main() {
    let args = Args::parse();
    if args.exact {
        return exact();
    }
    let load = Workload::new(64, 20_000);
    let mut ours = Lane::<Ours>::new(&load);
    let (mut radix, mut crtc) = (Lane::<Radix>::new(&load), Lane::<Crtc>::new(&load));
    let (mut positional, mut chain) = (Lane::<Positional>::new(&load), Lane::<Chain>::new(&load));
    for round in 0..args.rounds {
        eprintln!("64x20k: round {} of {}", round + 1, args.rounds);
        ours.queries(&load, round);
        radix.queries(&load, round);
        crtc.queries(&load, round);
        positional.queries(&load, round);
        chain.queries(&load, round);
        ours.updates(&load, round);
        radix.updates(&load, round);
        crtc.updates(&load, round);
        positional.updates(&load, round);
        chain.updates(&load, round);
    }
    let mine = ours.json();
    let peers = [radix.json(), crtc.json(), positional.json(), chain.json()];
    drop((ours, radix, crtc, positional, chain));

    let name = if args.large == 50_000 { "1000x50k".to_owned() } else { format!("1000x{} (scaled down)", args.large) };
    eprintln!("{name}");
    let load = Workload::new(1000, args.large);
    let mine_large = large::<Ours>(&load, args.rounds);
    let peers_large = [large::<Crtc>(&load, args.rounds), large::<Chain>(&load, args.rounds)];

    let rates = each(UPDATES, |kind| rate(&mine, kind));
    let rate_ratios =
        each(UPDATES, |kind| rate(&mine, kind) / peers.iter().map(|peer| rate(peer, kind)).fold(0.0, f64::max));
    let summary = json!({
        "decision_us_p50": named(["64x20k", &name], [&mine, &mine_large].map(|of| each(classes(), |class| p50(of, class)))),
        "ratio_to_fastest_peer": named(["64x20k", &name], [ratios(&mine, &peers), ratios(&mine_large, &peers_large)]),
        "updates_per_s": rates,
        "update_ratio_to_peer": rate_ratios,
        "bytes_per_block": mine["bytes_per_block"],
        "hash_8000_4img_us": hashing::p50_us(),
        "ours": named(["64x20k", &name], [mine, mine_large]),
        "peers": {
            "64x20k": named([Radix::NAME, Crtc::NAME, Positional::NAME, Chain::NAME], peers),
            name: named([Crtc::NAME, Chain::NAME], peers_large),
        },
    });
    println!("{summary}");
}
