//! Builds the encoder, and chooses a hand-off once the engine is seen; again when another engine takes its place.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use fovea_encoder::cache::{self, EmbeddingCache};
use fovea_encoder::handoff::choose::{Engine, EngineKind as Kind, Mode, choose};
use fovea_encoder::handoff::ec_shm::{EngineState, Settings};
use fovea_encoder::handoff::flags::{CommandLine, Requirement, Verdict};
use fovea_encoder::passthrough::{FaultSwitch, PassThrough, PassThroughConfig, Rows};
use fovea_encoder::python::{PythonConfig, PythonEncoder};
use fovea_encoder::service::{Encoder, ServiceConfig};
use fovea_encoder::tensor::{DType, EngineTensor};
use fovea_gossip::message::{EngineFacts, EngineKind};
use fovea_media::family::{ModelFiles, PatchRule};
use http::{Request, header};
use serde_json::Value;
use tokio_util::sync::CancellationToken;

use super::{Encoding, EngineName, Ready, Status};
use crate::body;
use crate::config::Config;
use crate::config::encoder::{Backend, EncoderConfig, Mode as ConfiguredMode};
use crate::engine::discover::EngineClient;
use crate::proxy::model_files;
use crate::state::State;

/// Between two looks at what the engine is.
const LOOK_EVERY: Duration = Duration::from_millis(500);
/// After a failure that time may heal.
const RETRY_AFTER: Duration = Duration::from_secs(5);
const FILE_BYTES_MAX: u64 = 8 << 20;
const ANSWER_BYTES_MAX: usize = 64 << 10;

/// Keeps `encoding` ready for the engine at hand, until the stop; then closes the encoder.
pub struct Starter {
    pub encoding: Arc<Encoding>,
    pub state: Arc<State>,
    pub config: Arc<Config>,
    pub client: EngineClient,
    pub stop: CancellationToken,
}

impl Starter {
    pub async fn run(self) {
        let mut built = None;
        let mut wait = Duration::ZERO;
        loop {
            tokio::select! {
                biased;
                () = self.stop.cancelled() => break,
                () = tokio::time::sleep(wait) => {}
            }
            wait = LOOK_EVERY;
            let Some(facts) = self.state.facts().filter(|_| self.state.is_up()) else { continue };
            if self.encoding.ready(Some(&facts)).is_ok() {
                continue;
            }
            let made = tokio::select! {
                biased;
                () = self.stop.cancelled() => break,
                made = self.make(&facts, &mut built) => made,
            };
            match made {
                Ok(ready) => {
                    tracing::info!(handoff = ready.hand_off.name(), "the encoder is ready");
                    self.state.set_encoder(ready.fingerprint());
                    self.encoding.set(Status::Ready(Arc::new(ready)));
                }
                Err(problem) => {
                    if self.encoding.problem().as_ref() != Some(&problem) {
                        tracing::error!(problem, "the encoder is not ready");
                    }
                    self.encoding.set(Status::NotReady(problem));
                    wait = RETRY_AFTER;
                }
            }
        }
        self.encoding.set(Status::NotReady("the sidecar stops".to_owned()));
        if let Some(encoder) = built {
            encoder.close().await;
        }
    }

    async fn make(&self, facts: &EngineFacts, built: &mut Option<Encoder>) -> Result<Ready, String> {
        let config = &self.encoding.config;
        let dir = model_files::directory(self.config.model.dir.as_deref(), Some(&facts.engine_model));
        let dir = dir.ok_or("the model directory is not known; set model.dir in sidecar.yaml")?;
        let text = read(&dir, "config.json").await?;
        let model = EngineTensor::from_config(&text).map_err(|error| error.to_string())?;
        let encoder = match built {
            Some(encoder) => encoder.clone(),
            None => built.insert(build(config, &model, &dir, &text).await?).clone(),
        };
        if let Some(width) = encoder.spec().width.filter(|&width| width != model.width()) {
            let wanted = model.width();
            return Err(format!(
                "the encoder gives rows {width} wide, the engine's model takes {wanted}; use one for this model"
            ));
        }
        let line = (!config.handoff.engine_args.is_empty()).then(|| CommandLine::parse(&config.handoff.engine_args));
        let settings = Settings {
            folder: config.handoff.path.clone(),
            bytes_max: config.handoff.bytes.as_u64(),
            foreign_keep: config.handoff.grace,
        };
        let (kind, version, mode) = (kind(facts.kind), facts.version.clone(), mode(config.handoff.mode));
        let chosen = tokio::task::spawn_blocking(move || {
            let state = EngineState::Unknown;
            choose(
                &Engine { kind, version: &version, model: &model, command_line: line.as_ref(), state },
                mode,
                settings,
            )
            .map_err(|error| error.to_string())
        });
        let hand_off = chosen.await.map_err(|error| error.to_string())??;
        if !["vllm-ec-shm", "vllm-image-embeds"].contains(&hand_off.name()) {
            return Err(format!(
                "hand-off {} is not served by this sidecar; use a vLLM with a vision model",
                hand_off.name()
            ));
        }
        if config.handoff.engine_args.is_empty() {
            for requirement in hand_off.requirements() {
                self.probe(facts, &requirement).await?;
            }
        }
        let cache =
            EmbeddingCache::new(cache::Settings { bytes_max: config.cache_bytes.as_u64(), ..Default::default() });
        Ok(Ready { encoder, hand_off, cache, engine: EngineName::of(facts) })
    }

    /// Asks the engine itself for a flag, where a harmless request can tell.
    async fn probe(&self, facts: &EngineFacts, requirement: &Requirement) -> Result<(), String> {
        let flag = requirement.flag;
        let unknown = || format!("whether the engine has {flag} cannot be told; write encoder.handoff.engine_args");
        let probe = requirement.probe.as_ref().ok_or_else(unknown)?;
        let name = facts.served_names.first().map_or("", String::as_str);
        let name = Value::from(name).to_string();
        let text = probe.body.replace("MODEL", name.trim_matches('"'));
        let url = format!("{}{}", self.config.engine.url.trim_end_matches('/'), probe.path);
        let request = Request::post(url).header(header::CONTENT_TYPE, "application/json").body(body::full(text));
        let request = request.map_err(|error| error.to_string())?;
        let limit = self.config.engine.check_timeout;
        let answer = tokio::time::timeout(limit, self.client.request(request)).await;
        let answer = answer.map_err(|_| unknown())?.map_err(|error| error.to_string())?;
        let status = answer.status().as_u16();
        let told = body::read(body::boxed(answer.into_body()), ANSWER_BYTES_MAX, limit).await;
        match probe.verdict(status, &told.map_err(|error| error.to_string())?) {
            Verdict::Set => Ok(()),
            Verdict::Missing => {
                Err(format!("engine was started without {flag}: {}; start it with that flag", requirement.without))
            }
            Verdict::Unknown => Err(unknown()),
        }
    }
}

async fn build(config: &EncoderConfig, model: &EngineTensor, dir: &Path, text: &str) -> Result<Encoder, String> {
    let service = ServiceConfig {
        max_queued_cost: config.batching.max_queued_cost,
        max_pending_images: config.batching.max_pending_images,
        max_batch_items: config.batching.max_batch_items,
        ..ServiceConfig::default()
    };
    let started = match config.backend {
        Backend::Off => return Err("encoder.backend is off".to_owned()),
        Backend::Passthrough => {
            let preprocessor = read(dir, "preprocessor_config.json").await.ok();
            let parse = |text: &str| serde_json::from_str::<Value>(text).map_err(|error| error.to_string());
            let (whole, preprocessor) = (parse(text)?, preprocessor.as_deref().map(parse).transpose()?);
            let files =
                ModelFiles { config: &whole, preprocessor: preprocessor.as_ref(), processor: None, kwargs: None };
            let rule = PatchRule::from_files(&files).map_err(|error| error.to_string())?;
            let passthrough = PassThroughConfig {
                width: model.width(),
                dtype: DType::Bf16,
                rows: Rows::Grid(rule),
                seed: 0,
                max_batch_cost: None,
                faults: FaultSwitch::default(),
            };
            Encoder::start(service, move || PassThrough::build(passthrough)).await
        }
        Backend::Python => {
            let section = &config.python;
            let mut python = PythonConfig::new(section.class.clone(), section.model.clone());
            python.interpreter = section.interpreter.clone();
            python.python_path = section.python_path.clone();
            python.cuda_visible_devices = section.cuda_visible_devices.clone();
            python.revision = section.revision.clone();
            python.preprocess_concurrency = section.preprocess_concurrency;
            python.transfer_dir = section.transfer_dir.clone();
            python.start_timeout = section.start_timeout;
            python.preprocess_timeout = section.preprocess_timeout;
            python.forward_timeout = section.forward_timeout;
            Encoder::start(service, move || PythonEncoder::build(python)).await
        }
    };
    started.map_err(|error| error.to_string())
}

fn kind(kind: EngineKind) -> Kind {
    match kind {
        EngineKind::Vllm => Kind::Vllm,
        EngineKind::Sglang => Kind::Sglang,
        EngineKind::TrtLlm => Kind::TrtLlm,
    }
}

fn mode(mode: ConfiguredMode) -> Mode {
    match mode {
        ConfiguredMode::Auto => Mode::Auto,
        ConfiguredMode::EcShm => Mode::EcShm,
        ConfiguredMode::ImageEmbeds => Mode::ImageEmbeds,
    }
}

/// A small text file of the model directory.
async fn read(dir: &Path, name: &str) -> Result<String, String> {
    let path = dir.join(name);
    let failed = |error: &dyn std::fmt::Display| format!("cannot read {}: {error}; set model.dir", path.display());
    let about = tokio::fs::metadata(&path).await.map_err(|error| failed(&error))?;
    if !about.is_file() || about.len() > FILE_BYTES_MAX {
        return Err(failed(&"no file, or longer than 8 MiB"));
    }
    tokio::fs::read_to_string(&path).await.map_err(|error| failed(&error))
}
