//! The JSON files of a model that its image rule is made of.

use std::path::Path;

use fovea_media::family::{ConfigError, ModelFiles, VideoModel, VisionModel};
use fovea_prompt::PromptModel;
use serde_json::Value;

use super::error::{LoadError, read_json};

/// Kept whole, because a request's own options make another rule of them.
pub(super) struct Files {
    pub config: Value,
    preprocessor: Option<Value>,
    processor: Option<Value>,
    video: Option<Value>,
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
            video: optional("video_preprocessor_config.json")?,
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
        VisionModel::from_files(&files, |text| encode(prompt, text))
    }

    /// The video rule, without options of a request.
    pub fn video(&self, prompt: &PromptModel) -> Result<VideoModel, ConfigError> {
        let files = ModelFiles {
            config: &self.config,
            preprocessor: self.video.as_ref().or(self.preprocessor.as_ref()),
            processor: self.processor.as_ref(),
            kwargs: None,
        };
        VideoModel::from_files(&files, |text| encode(prompt, text))
    }
}

/// Ids of a text, special tokens in it parsed as such and none added.
pub(super) fn encode(prompt: &PromptModel, text: &str) -> Option<Vec<u32>> {
    let mut ids = Vec::new();
    prompt.encode(text, false, &mut ids).ok().map(|()| ids)
}
