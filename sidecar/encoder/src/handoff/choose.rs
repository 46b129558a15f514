//! Which hand-off an engine gets: decided once, at start, from what the engine is and how it was started.

use std::sync::Arc;

use super::ec_shm::{self, EcShm, EcStore, EngineState, OpenError};
use super::flags::{CommandLine, StartError};
use super::image_embeds::{self, ImageEmbeds};
use super::prompt_embeds::PromptEmbeds;
use super::sglang_epd::{Layout, SglangEpd};
use super::trtllm::TrtImageEmbeds;
use super::{HandOff, flags};
use crate::tensor::EngineTensor;

/// Families of engines, as far as hand-offs differ.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EngineKind {
    Vllm,
    Sglang,
    TrtLlm,
}

impl EngineKind {
    fn name(self) -> &'static str {
        match self {
            Self::Vllm => "vLLM",
            Self::Sglang => "SGLang",
            Self::TrtLlm => "TensorRT-LLM",
        }
    }
}

/// What the operator asks for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Mode {
    /// The cheapest that the engine was started for.
    #[default]
    Auto,
    EcShm,
    ImageEmbeds,
    PromptEmbeds,
    SglangEpd,
    TrtImageEmbeds,
}

impl Mode {
    fn name(self) -> &'static str {
        match self {
            Self::Auto => "auto",
            Self::EcShm => "vllm-ec-shm",
            Self::ImageEmbeds => "vllm-image-embeds",
            Self::PromptEmbeds => "vllm-prompt-embeds",
            Self::SglangEpd => "sglang-epd",
            Self::TrtImageEmbeds => "trtllm-image-embeds",
        }
    }

    fn engine(self) -> Option<EngineKind> {
        match self {
            Self::Auto => None,
            Self::EcShm | Self::ImageEmbeds | Self::PromptEmbeds => Some(EngineKind::Vllm),
            Self::SglangEpd => Some(EngineKind::Sglang),
            Self::TrtImageEmbeds => Some(EngineKind::TrtLlm),
        }
    }
}

/// What is known of the engine.
#[derive(Clone, Copy, Debug)]
pub struct Engine<'a> {
    pub kind: EngineKind,
    /// As it reports itself, such as `0.32.0+cpu`.
    pub version: &'a str,
    pub model: &'a EngineTensor,
    /// `None` when nobody knows it: then flags are not held against it, and [`HandOff::requirements`] has probes.
    pub command_line: Option<&'a CommandLine>,
    pub state: EngineState,
}

/// Why there is no hand-off.
#[derive(Debug, thiserror::Error)]
pub enum ChooseError {
    #[error(transparent)]
    Start(#[from] StartError),
    #[error(transparent)]
    Open(#[from] OpenError),
}

/// First version with grid-only parts and float16 `.npy` that was measured.
const VLLM_MIN: (u32, u32) = (0, 32);

/// Picks and opens a hand-off.
///
/// # Errors
/// When the mode does not fit the engine, its version, its model or its flags; the text names what to change.
pub fn choose(engine: &Engine<'_>, mode: Mode, ec: ec_shm::Settings) -> Result<Arc<dyn HandOff>, ChooseError> {
    let mode = if mode == Mode::Auto { automatic(engine, &ec)? } else { mode };
    if let Some(wanted) = mode.engine().filter(|&wanted| wanted != engine.kind) {
        let (mode, wanted, found) = (mode.name(), wanted.name(), engine.kind.name());
        return Err(StartError::WrongEngine { mode, wanted, found }.into());
    }
    check_model(engine, mode)?;
    check_version(engine, mode)?;
    let model = engine.model.clone();
    let (hand_off, requirements): (Arc<dyn HandOff>, _) = match mode {
        Mode::EcShm => {
            // Flags first: nothing is written for an engine that will not look.
            let needed = vec![ec_shm::requirement(&ec.folder)];
            check_flags(engine, &needed)?;
            (Arc::new(EcShm::new(model, EcStore::open(ec, engine.state)?)), needed)
        }
        Mode::Auto | Mode::ImageEmbeds => with_requirements(ImageEmbeds::new(model)),
        Mode::PromptEmbeds => with_requirements(PromptEmbeds::new(model)),
        Mode::SglangEpd => with_requirements(SglangEpd::new(model)),
        Mode::TrtImageEmbeds => with_requirements(TrtImageEmbeds::new(model)),
    };
    check_flags(engine, &requirements)?;
    Ok(hand_off)
}

fn with_requirements(hand_off: impl HandOff + 'static) -> (Arc<dyn HandOff>, Vec<flags::Requirement>) {
    let requirements = hand_off.requirements();
    (Arc::new(hand_off), requirements)
}

fn check_flags(engine: &Engine<'_>, requirements: &[flags::Requirement]) -> Result<(), StartError> {
    engine.command_line.map_or(Ok(()), |line| line.check(requirements))
}

fn automatic(engine: &Engine<'_>, ec: &ec_shm::Settings) -> Result<Mode, StartError> {
    let line = match (engine.kind, engine.command_line) {
        (EngineKind::Sglang, _) => return Ok(Mode::SglangEpd),
        (EngineKind::TrtLlm, _) => return Ok(Mode::TrtImageEmbeds),
        (EngineKind::Vllm, line) => line,
    };
    if !engine.model.vision {
        return Ok(Mode::PromptEmbeds);
    }
    let Some(line) = line else { return Ok(Mode::ImageEmbeds) };
    if line.check(&[ec_shm::requirement(&ec.folder)]).is_ok() && engine.model.merge.is_some() {
        return Ok(Mode::EcShm);
    }
    match line.check(&[image_embeds::mm_embeds()]) {
        Ok(()) => Ok(Mode::ImageEmbeds),
        Err(_) => Err(StartError::None {
            remedy: "start vLLM with --ec-transfer-config for encoder.handoff.path or with --enable-mm-embeds",
        }),
    }
}

fn check_model(engine: &Engine<'_>, mode: Mode) -> Result<(), StartError> {
    let model = engine.model;
    let needs = match mode {
        Mode::EcShm if model.merge.is_none() => "with a patch grid (the Qwen families)",
        Mode::ImageEmbeds | Mode::Auto if !model.vision => {
            "with a vision tower of its own; vllm-prompt-embeds is for text models"
        }
        // A prompt_embeds part and an image in one request end such an engine.
        Mode::PromptEmbeds if model.levels > 0 => "without deepstack; use vllm-ec-shm or vllm-image-embeds",
        Mode::PromptEmbeds if model.dtype.is_none() => "whose config.json names its dtype: block keys depend on it",
        Mode::SglangEpd if model.merge.is_none() => "with a patch grid (the Qwen families)",
        _ => return Ok(()),
    };
    Err(StartError::Model { mode: mode.name(), needs, model_type: model.model_type.clone() })
}

fn check_version(engine: &Engine<'_>, mode: Mode) -> Result<(), StartError> {
    let too_old = |wanted| StartError::TooOld { mode: mode.name(), wanted, found: engine.version.to_owned() };
    match engine.kind {
        // An engine that hides its version is taken at the operator's word.
        EngineKind::Vllm if version(engine.version).is_some_and(|(major, minor, _)| (major, minor) < VLLM_MIN) => {
            Err(too_old("vLLM 0.32"))
        }
        EngineKind::Sglang if Layout::for_version(engine.version).is_none() => Err(too_old("SGLang 0.5.23")),
        _ => Ok(()),
    }
}

/// Major, minor and patch of a version such as `0.32.0+cpu` or `v0.5.23.post1`.
pub(super) fn version(text: &str) -> Option<(u32, u32, u32)> {
    let mut numbers = text.trim_start_matches('v').split(['.', '+', '-']).map(|piece| {
        let digits = piece.bytes().take_while(u8::is_ascii_digit).count();
        piece[..digits].parse::<u32>()
    });
    let mut next = || numbers.next()?.ok();
    Some((next()?, next()?, next().unwrap_or(0)))
}
