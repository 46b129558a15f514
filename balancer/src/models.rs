//! What is loaded for each configured model: tokenizer, template and image rules, found by any name the model has.

use std::collections::HashMap;
use std::sync::Arc;

use fovea_gossip::message::EngineFacts;

use crate::config::ModelConfig;
use crate::prepare::{ClientUuid, LoadError, Preparer};

/// Preparers by the name given in the config.
#[derive(Default)]
pub struct Models(HashMap<String, Arc<Preparer>>);

#[derive(Debug, thiserror::Error)]
#[error("models: cannot load `{name}`; check `dir` of this model")]
pub struct ModelError {
    name: String,
    #[source]
    source: LoadError,
}

impl Models {
    /// Blocking; a large vocabulary takes a second. A directory named twice is loaded once.
    ///
    /// # Errors
    /// When a directory lacks what every model has.
    pub fn load(configs: &[ModelConfig]) -> Result<Self, ModelError> {
        let mut by_dir: HashMap<&std::path::Path, Arc<Preparer>> = HashMap::new();
        let mut models = HashMap::new();
        for ModelConfig { name, dir } in configs {
            let preparer = match by_dir.get(dir.as_path()) {
                Some(loaded) => Arc::clone(loaded),
                None => {
                    let loaded = Preparer::load(dir, ClientUuid::Replace)
                        .map_err(|source| ModelError { name: name.clone(), source })?;
                    Arc::clone(by_dir.entry(dir).or_insert(Arc::new(loaded)))
                }
            };
            models.insert(name.clone(), preparer);
        }
        Ok(Self(models))
    }

    /// The config names this model, so it is expected here even while no worker serves it.
    pub fn declares(&self, name: &str) -> bool {
        self.0.contains_key(name)
    }

    /// The model that an engine serves: by one of its base names, else by its own model string.
    pub fn find(&self, base_names: &[String], engine: &EngineFacts) -> Option<&Arc<Preparer>> {
        base_names.iter().chain([&engine.engine_model]).find_map(|name| self.0.get(name))
    }
}
