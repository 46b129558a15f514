//! The JSON files of a model that its image rule is made of.

use std::path::Path;

use fovea_media::family::{ConfigError, ModelFiles, VisionModel};
use fovea_prompt::PromptModel;
use serde_json::Value;

use super::error::{LoadError, read_json};

/// Kept whole, because a request's own options make another rule of them.
pub(super) struct Files {
    pub config: Value,
    preprocessor: Option<Value>,
    processor: Option<Value>,
}

impl Files {
    pub fn read(dir: &Path) -> Result<Self, LoadError> {
        let optional = |name| {
            let path = dir.join(name);
            path.exists().then(|| read_json(&path)).transpose()
        };
        Ok(Self {
            config: read_json(&dir.join("config.json"))?,
            preprocessor: optional("preprocessor_config.json")?,
            processor: optional("processor_config.json")?,
        })
    }

    /// The image rule under `kwargs`, the request's `mm_processor_kwargs`.
    pub fn vision(&self, prompt: &PromptModel, kwargs: Option<&Value>) -> Result<VisionModel, ConfigError> {
        let files = ModelFiles {
            config: &self.config,
            preprocessor: self.preprocessor.as_ref(),
            processor: self.processor.as_ref(),
            kwargs,
        };
        VisionModel::from_files(&files, |text| {
            let mut ids = Vec::new();
            prompt.encode(text, false, &mut ids).ok().map(|()| ids)
        })
    }
}
