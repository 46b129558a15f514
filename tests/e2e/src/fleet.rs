//! N simulated engines, a sidecar beside each, one balancer.

use std::collections::{BTreeMap, HashSet};
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::Context;
use serde_json::Value;

use crate::client::Client;
use crate::program::{Program, eventually};

/// Longest wait for the balancer to see all workers.
const LIVE_MAX: Duration = Duration::from_secs(30);

/// How the balancer picks a worker.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    RoundRobin,
    Session,
    Precise,
}

impl Mode {
    /// Value of `mode` in balancer.yaml.
    pub fn config(self) -> &'static str {
        match self {
            Self::RoundRobin => "round_robin",
            Self::Session => "session",
            Self::Precise => "precise",
        }
    }
}

#[derive(Clone, Debug)]
pub struct FleetConfig {
    /// Engines, each with its sidecar.
    pub workers: usize,
    /// Data-parallel ranks of each engine; each is a worker of its own.
    pub ranks: usize,
    pub mode: Mode,
    pub model_dir: PathBuf,
    /// The balancer is given `model_dir` too; false = it pulls the files from a worker.
    pub balancer_has_model: bool,
    /// Flags of `engine-sim` besides ports and model.
    pub engine_args: Vec<String>,
    /// Lines added to balancer.yaml.
    pub balancer_extra: String,
    /// `trust` of sidecar.yaml.
    pub trust: &'static str,
    /// Lines added to sidecar.yaml.
    pub sidecar_extra: String,
}

impl FleetConfig {
    /// `workers` engines of the committed tiny model, as fast as the machine can.
    pub fn tiny(workers: usize, mode: Mode) -> Self {
        Self {
            workers,
            ranks: 1,
            mode,
            model_dir: tiny_model(),
            balancer_has_model: true,
            engine_args: ["--speed", "0", "--block-size", "32", "--blocks", "4000"].map(str::to_owned).to_vec(),
            balancer_extra: String::new(),
            trust: "trust: {loopback: true}",
            sidecar_extra: String::new(),
        }
    }
}

/// Folder of the committed tiny Qwen3-VL.
pub fn tiny_model() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../vectors/vllm/tiny-qwen3-vl")
}

/// All programs of one fleet; they end when it is dropped.
pub struct Fleet {
    pub engines: Vec<Program>,
    pub sidecars: Vec<Program>,
    pub balancer: Program,
    pub client: Client,
    config: FleetConfig,
    dir: tempfile::TempDir,
}

impl Fleet {
    /// Starts everything and waits until the balancer routes to every worker.
    ///
    /// # Errors
    /// When a program does not start or a worker does not appear; the text holds the logs' folder.
    pub async fn start(config: FleetConfig) -> anyhow::Result<Self> {
        let mut fleet = Self::without_workers(config).await?;
        let mut urls = Vec::new();
        for index in 0..fleet.config.workers {
            let engine = fleet.start_engine(index, 0).await?;
            urls.push(format!("http://{}", engine.addr("http")?));
            fleet.engines.push(engine);
        }
        fleet.attach(&urls).await?;
        Ok(fleet)
    }

    /// A balancer that waits for workers.
    pub async fn without_workers(config: FleetConfig) -> anyhow::Result<Self> {
        let dir = tempfile::Builder::new().prefix("fovea-").tempdir()?;
        let balancer = start_balancer(&config, dir.path()).await?;
        Ok(Self { engines: Vec::new(), sidecars: Vec::new(), balancer, client: Client::default(), config, dir })
    }

    /// Starts a sidecar beside each engine and waits until the balancer routes to all of them.
    pub async fn attach(&mut self, engine_urls: &[String]) -> anyhow::Result<()> {
        for url in engine_urls {
            let sidecar = self.start_sidecar(self.sidecars.len(), url).await?;
            self.sidecars.push(sidecar);
        }
        self.wait_for_workers(self.sidecars.len() * self.config.ranks).await
    }

    /// Starts an engine beside the others; port 0 = any.
    pub async fn start_engine(&self, index: usize, port: u16) -> anyhow::Result<Program> {
        self.start_engine_of(&self.config.model_dir, index, port).await
    }

    /// As [`Self::start_engine`], with another model than the balancer's.
    pub async fn start_engine_of(&self, model_dir: &Path, index: usize, port: u16) -> anyhow::Result<Program> {
        let model_dir = model_dir.display().to_string();
        let mut args = vec!["--port".into(), port.to_string(), "--model-dir".into(), model_dir];
        args.extend(["--engine-model".into(), "./tiny-qwen3-vl".into(), "--model-name".into(), "tiny-vl".into()]);
        args.extend(["--data-parallel-size".into(), self.config.ranks.to_string()]);
        args.extend(self.config.engine_args.iter().cloned());
        Program::start("engine-sim", &args, &self.dir.path().join(format!("engine-{index}.log"))).await
    }

    /// Starts a sidecar for the engine at `engine_url`.
    pub async fn start_sidecar(&self, index: usize, engine_url: &str) -> anyhow::Result<Program> {
        let sync = self.balancer.addr("sync")?;
        let yaml = format!(
            "listen: 127.0.0.1:0\nadmin: 127.0.0.1:0\nbalancers: [\"{sync}\"]\nengine:\n  url: {engine_url}\n  check_interval: 200ms\n{}\n{}",
            self.config.trust, self.config.sidecar_extra
        );
        let path = self.dir.path().join(format!("sidecar-{index}.yaml"));
        tokio::fs::write(&path, yaml).await?;
        let log = self.dir.path().join(format!("sidecar-{index}.log"));
        Program::start("fovea-sidecar", &run_args(&path), &log).await
    }

    /// Waits until the balancer counts `count` workers that it may trust for overlap.
    pub async fn wait_for_workers(&self, count: usize) -> anyhow::Result<()> {
        let url = format!("http://{}/debug/workers", self.balancer.addr("admin")?);
        eventually(&format!("{count} live workers (logs in {})", self.dir.path().display()), LIVE_MAX, || async {
            let workers = self.client.get_json(&url).await?;
            let up = |worker: &&Value| worker["state"] == "up" && worker["events"] == true;
            let live = workers["workers"].as_array().context("no workers")?.iter().filter(up).count();
            Ok((live == count).then_some(()))
        })
        .await
    }

    /// Waits until the balancer holds as many blocks as the engines do, and knows that nothing runs: reports of load lag by up to 50 ms.
    pub async fn settled(&self) -> anyhow::Result<()> {
        eventually("the balancer holds what the engines hold", LIVE_MAX, || async {
            let states = self.engine_states().await?;
            let ranks = states.iter().flat_map(|state| state["ranks"].as_array().into_iter().flatten());
            let tier = |state: &Value, tier: &str| state[tier].as_array().cloned().unwrap_or_default();
            let blocks = |state: &Value| {
                let all = [tier(state, "cached_blocks"), tier(state, "cpu_blocks")].concat();
                all.iter().map(Value::to_string).collect::<HashSet<_>>().len()
            };
            let held: usize = ranks.map(blocks).sum();
            let at_rest = self.index_entries().await? == held as u64 && self.outstanding().await? == 0;
            Ok(at_rest.then_some(()))
        })
        .await
    }

    /// Waits until the balancer knows that nothing runs.
    pub async fn quiet(&self) -> anyhow::Result<()> {
        eventually("nothing runs", LIVE_MAX, || async { Ok((self.outstanding().await? == 0).then_some(())) }).await
    }

    /// (block, worker) pairs in the balancer's indexes.
    pub async fn index_entries(&self) -> anyhow::Result<u64> {
        let workers = self.client.get_json(&format!("http://{}/debug/workers", self.balancer.addr("admin")?)).await?;
        let pools = workers["pools"].as_array().context("no pools")?;
        Ok(pools.iter().filter_map(|pool| pool["index_entries"].as_u64()).sum())
    }

    /// Requests that the balancer believes to run or wait.
    async fn outstanding(&self) -> anyhow::Result<u64> {
        let workers = self.client.get_json(&format!("http://{}/debug/workers", self.balancer.addr("admin")?)).await?;
        let workers = workers["workers"].as_array().context("no workers")?;
        let count = |worker: &Value, field: &str| worker[field].as_u64().unwrap_or(1);
        Ok(workers.iter().map(|w| count(w, "running") + count(w, "waiting") + count(w, "booked_requests")).sum())
    }

    /// Front URL of the balancer, without a slash at its end.
    pub fn url(&self) -> anyhow::Result<String> {
        Ok(format!("http://{}", self.balancer.addr("http")?))
    }

    /// URL of chat completions.
    pub fn chat_url(&self) -> anyhow::Result<String> {
        Ok(format!("{}/v1/chat/completions", self.url()?))
    }

    /// `/sim/state` of every engine.
    pub async fn engine_states(&self) -> anyhow::Result<Vec<Value>> {
        let mut states = Vec::new();
        for engine in &self.engines {
            states.push(self.client.get_json(&format!("http://{}/sim/state", engine.addr("http")?)).await?);
        }
        Ok(states)
    }

    /// `/metrics` of the balancer.
    pub async fn balancer_metrics(&self) -> anyhow::Result<String> {
        let answer = self.client.get(&format!("http://{}/metrics", self.balancer.addr("admin")?)).await?;
        Ok(String::from_utf8_lossy(&answer.body).into_owned())
    }

    /// Predicted requests by how the prediction turned out, as all sidecars count them.
    pub async fn verdicts(&self) -> anyhow::Result<BTreeMap<String, u64>> {
        let mut all = BTreeMap::new();
        for sidecar in &self.sidecars {
            let answer = self.client.get(&format!("http://{}/metrics", sidecar.addr("admin")?)).await?;
            for line in String::from_utf8_lossy(&answer.body).lines() {
                let Some(rest) = line.strip_prefix("sidecar_predictions_total{") else { continue };
                let (labels, count) = rest.split_once("} ").context("a sample has a value")?;
                let verdict = labels.split_once("verdict=\"").context("a verdict is a label")?.1;
                *all.entry(verdict.trim_end_matches('"').to_owned()).or_default() += count.parse::<u64>()?;
            }
        }
        Ok(all)
    }

    /// Waits until `count` predictions have a verdict; gives how many of each.
    pub async fn judged(&self, count: u64) -> anyhow::Result<BTreeMap<String, u64>> {
        eventually(&format!("{count} verdicts"), LIVE_MAX, || async {
            let all = self.verdicts().await?;
            Ok((all.values().sum::<u64>() == count).then_some(all))
        })
        .await
    }

    /// Folder of configs and logs, deleted with the fleet.
    pub fn dir(&self) -> &Path {
        self.dir.path()
    }
}

fn run_args(config: &Path) -> Vec<String> {
    ["run", "--config"].map(str::to_owned).into_iter().chain([config.display().to_string()]).collect()
}

async fn start_balancer(config: &FleetConfig, dir: &Path) -> anyhow::Result<Program> {
    let dir_of_model = match config.balancer_has_model {
        true => format!("    dir: {}\n", config.model_dir.display()),
        false => String::new(),
    };
    let yaml = format!(
        "listen: 127.0.0.1:0\nadmin: 127.0.0.1:0\nsync: 127.0.0.1:0\nmode: {}\ndebug_headers: true\nmodels:\n  - name: tiny-vl\n{dir_of_model}{}",
        config.mode.config(),
        config.balancer_extra
    );
    let path = dir.join("balancer.yaml");
    tokio::fs::write(&path, yaml).await?;
    Program::start("fovea-balancer", &run_args(&path), &dir.join("balancer.log")).await
}
