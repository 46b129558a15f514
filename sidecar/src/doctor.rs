//! `fovea-sidecar doctor`: asks an engine what Fovea needs of it, and says what to change in its command line.
//!
//! **Invariant:** does no harm. Pages are only read, no path with an effect is asked for, and the probe is two or three requests of one
//! output token each. One exception: TensorRT-LLM's event queue is emptied by reading it, so that a sidecar beside it starts anew;
//! without the probe it is left alone.

mod ask;
mod check;
mod evidence;
mod family;
mod host;
mod judge;
mod listen;
mod picture;
mod probe;
mod sglang;
mod trtllm;
mod vllm;

use std::io;
use std::path::PathBuf;
use std::time::Duration;

use fovea_service::config::{Validate, human_duration};
use http::Method;
use serde::de::IntoDeserializer;
use tokio::time::Instant;

pub use check::{Check, Report};

use crate::config::{Config, Kind, load};
use crate::engine::discover::{DiscoverError, Discovered, discover};
use crate::proxy::forward::client;
use ask::Ask;
use check::{Verdict, chain};

/// Limit of a connection to the engine.
const CONNECT: Duration = Duration::from_secs(2);
/// Limit of one answer about health.
const HEALTH: Duration = Duration::from_secs(5);

/// Stands for a model string that nobody told.
const NO_MODEL_STRING: &str = "(not told)";

/// Command line of `doctor`.
#[derive(Clone, Debug, clap::Args)]
pub struct Args {
    /// Base URL of the engine, e.g. http://127.0.0.1:8200; left out = engine.url of --config.
    #[arg(long, required_unless_present = "config")]
    engine: Option<String>,
    /// Family of the engine; left out = engine.kind of --config, else asked.
    #[arg(long, value_parser = ["auto", "vllm", "sglang", "trtllm"])]
    kind: Option<String>,
    /// Served name that the probe asks for; left out = the first.
    #[arg(long)]
    model: Option<String>,
    /// Path of sidecar.yaml, whose settings are then checked too.
    #[arg(long)]
    config: Option<PathBuf>,
    /// Print one JSON object.
    #[arg(long)]
    json: bool,
    /// Send no request that makes the engine compute.
    #[arg(long)]
    no_probe: bool,
    /// Limit of the whole run.
    #[arg(long, default_value = "30s", value_parser = duration)]
    timeout: Duration,
}

/// What is to be looked at.
#[derive(Clone, Debug)]
pub struct Options {
    /// With `engine.url` and `engine.kind`.
    pub config: Config,
    pub model: Option<String>,
    pub probe: bool,
    pub timeout: Duration,
}

fn duration(text: &str) -> Result<Duration, serde::de::value::Error> {
    human_duration::deserialize(text.into_deserializer())
}

impl Args {
    /// # Errors
    /// The config file cannot be read, or something in it or in the arguments cannot work.
    fn options(&self) -> anyhow::Result<Options> {
        let mut config = self.config.as_deref().map(load).transpose()?.unwrap_or_default();
        if let Some(engine) = &self.engine {
            config.engine.url.clone_from(engine);
        }
        config.engine.kind = match self.kind.as_deref() {
            None => config.engine.kind,
            Some("vllm") => Kind::Vllm,
            Some("sglang") => Kind::Sglang,
            Some("trtllm") => Kind::TrtLlm,
            Some(_) => Kind::Auto,
        };
        config.validate()?;
        Ok(Options { config, model: self.model.clone(), probe: !self.no_probe, timeout: self.timeout })
    }
}

/// Runs the command and prints what was found. The exit status: 0 all is well, 1 something is wrong, 2 the engine cannot be reached or
/// the arguments are wrong.
///
/// # Errors
/// Stdout cannot be written.
pub async fn command(args: &Args) -> io::Result<u8> {
    let options = match args.options() {
        Ok(options) => options,
        Err(error) => {
            eprintln!("error: {error:#}");
            return Ok(2);
        }
    };
    let report = examine(&options).await;
    let out = io::stdout().lock();
    if args.json {
        report.write_json(out)?
    } else {
        report.write(out)?
    }
    Ok(report.status())
}

/// Looks at the engine, within `options.timeout` all in all.
pub async fn examine(options: &Options) -> Report {
    let config = &options.config;
    let ask =
        Ask { client: client(CONNECT), base: config.engine.url.clone(), deadline: Instant::now() + options.timeout };
    let health = match ask.bare(Method::GET, "/health", HEALTH).await {
        Ok(health) => health,
        Err(error) => {
            let verdict = Verdict::bad(
                format!("{}: {error}", ask.base),
                "start the engine, and give its own address with --engine",
            );
            return report(verdict, judge::nothing_known(Verdict::unknown("not asked: see above")), false);
        }
    };
    let skew = evidence::skew(&health);
    let reachable = if health.status.is_success() {
        Verdict::good(format!("{} in {} ms", ask.base, health.took.as_millis()))
    } else {
        let found = format!("{}: /health answered {}", ask.base, health.status.as_u16());
        Verdict::bad(found, "wait until the engine has started, or see its log")
    };
    let found = match tokio::time::timeout_at(ask.deadline, look(&ask, config)).await {
        Ok(Ok(found)) => found,
        Ok(Err(error)) => return report(reachable, judge::nothing_known(undiscovered(&error)), true),
        Err(_) => {
            let slow = Verdict::bad("did not tell what it is in time", "give a longer --timeout");
            return report(reachable, judge::nothing_known(slow), true);
        }
    };
    let gathered = evidence::gather(&ask, config, options.model.as_deref(), found, skew, options.probe);
    let evidence = Box::pin(gathered).await;
    report(reachable, judge::all(&evidence), true)
}

/// As the sidecar looks; without a model string too, so that the rest can be checked.
async fn look(ask: &Ask, config: &Config) -> Result<Discovered, DiscoverError> {
    match discover(&ask.client, config).await {
        Err(DiscoverError::NoModel) if config.model.engine_model.is_empty() => {
            let mut config = config.clone();
            config.model.engine_model = NO_MODEL_STRING.into();
            discover(&ask.client, &config).await
        }
        found => found,
    }
}

fn report(reachable: Verdict, rest: impl Iterator<Item = Check>, reached: bool) -> Report {
    Report::new(std::iter::once(reachable.named("reachable")).chain(rest).collect(), reached)
}

fn undiscovered(error: &DiscoverError) -> Verdict {
    let remedy = match error {
        DiscoverError::Status { status, .. } => match status.as_u16() {
            401 => "start the engine without --api-key: the sidecar has none; let it listen on loopback instead",
            403 => "give the engine's own address, not a sidecar's",
            _ => "give the engine's own address, and see its log",
        },
        DiscoverError::NoModel => "set model.engine_model and model.served_names in sidecar.yaml",
        _ => "give the engine's own address, and --kind if it is not told rightly",
    };
    Verdict::bad(chain(error), remedy)
}
