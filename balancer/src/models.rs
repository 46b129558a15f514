//! What is loaded for each model: tokenizer, template and image rules, from a directory of the config or pulled from a worker.

pub mod agenda;
pub mod pull;

use std::collections::{BTreeSet, HashMap, HashSet};
use std::path::Path;
use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard};

use fovea_gossip::message::EngineFacts;

use crate::config::{BalancerConfig, ModelConfig};
use crate::prepare::{ClientUuid, LoadError, Preparer};

/// Preparers of the models served here; those that are pulled come and go while requests are served.
#[derive(Default)]
pub struct Models {
    /// By the name given in the config.
    at_hand: HashMap<String, Arc<Preparer>>,
    /// Names of the config without a directory.
    wanted: HashSet<String>,
    /// Names that clients may count on.
    declared: BTreeSet<String>,
    /// Models without an entry are pulled too.
    wants_all: bool,
    /// A few; no lock is held across an await.
    pulled: RwLock<Vec<(Source, Arc<Preparer>)>>,
}

/// Workers that run one model: what is pulled from one of them holds for all. The names are part of it, because engines of different
/// models may all be started with a path such as `/model`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Source {
    base_names: Arc<[String]>,
    engine_model: String,
    engine_version: String,
}

impl Source {
    pub fn new(base_names: &Arc<[String]>, engine: &EngineFacts) -> Self {
        let (base_names, engine_model) = (Arc::clone(base_names), engine.engine_model.clone());
        Self { base_names, engine_model, engine_version: engine.version.clone() }
    }

    fn is_of(&self, base_names: &[String], engine: &EngineFacts) -> bool {
        let Self { base_names: names, engine_model, engine_version } = self;
        **names == *base_names && *engine_model == engine.engine_model && *engine_version == engine.version
    }

    /// For people.
    fn name(&self) -> &str {
        self.base_names.first().unwrap_or(&self.engine_model)
    }
}

#[derive(Debug, thiserror::Error)]
#[error("models: cannot load `{name}`; check `dir` of this model")]
pub struct ModelError {
    name: String,
    #[source]
    source: LoadError,
}

impl Models {
    /// Loads the models that have a directory. Blocking; a large vocabulary takes a second. A directory named twice is loaded once.
    ///
    /// # Errors
    /// When a directory lacks what every model has.
    pub fn load(config: &BalancerConfig) -> Result<Self, ModelError> {
        let mut by_dir: HashMap<&Path, Arc<Preparer>> = HashMap::new();
        let mut models = Self { wants_all: config.models_from_workers, ..Self::default() };
        for ModelConfig { name, dir, declared } in &config.models {
            if *declared {
                models.declared.insert(name.clone());
            }
            let Some(dir) = dir.as_deref() else {
                models.wanted.insert(name.clone());
                continue;
            };
            let preparer = match by_dir.get(dir) {
                Some(loaded) => Arc::clone(loaded),
                None => {
                    let loaded = Preparer::load(dir, ClientUuid::Replace)
                        .map_err(|source| ModelError { name: name.clone(), source })?;
                    Arc::clone(by_dir.entry(dir).or_insert(Arc::new(loaded)))
                }
            };
            models.at_hand.insert(name.clone(), preparer);
        }
        Ok(models)
    }

    /// The config names this model, so it is expected here even while no worker serves it.
    pub fn declares(&self, name: &str) -> bool {
        self.declared.contains(name)
    }

    /// All names that the config declares.
    pub fn declared(&self) -> impl Iterator<Item = &str> {
        self.declared.iter().map(String::as_str)
    }

    /// The model that an engine serves: by one of its base names, else by its own model string, else as pulled.
    pub fn find(&self, base_names: &[String], engine: &EngineFacts) -> Option<Arc<Preparer>> {
        let pulled = || {
            let pulled = self.pulled();
            let found = pulled.iter().find(|(source, _)| source.is_of(base_names, engine));
            found.map(|(_, preparer)| Arc::clone(preparer))
        };
        self.find_at_hand(base_names, &engine.engine_model).cloned().or_else(pulled)
    }

    /// Some model may have to be pulled.
    pub fn pulls(&self) -> bool {
        self.wants_all || !self.wanted.is_empty()
    }

    /// This model is to be pulled.
    fn wants(&self, source: &Source) -> bool {
        let mut names = source.base_names.iter().chain([&source.engine_model]);
        let wanted = self.wants_all || names.any(|name| self.wanted.contains(name));
        wanted && self.find_at_hand(&source.base_names, &source.engine_model).is_none()
    }

    fn find_at_hand(&self, base_names: &[String], engine_model: &String) -> Option<&Arc<Preparer>> {
        base_names.iter().chain([engine_model]).find_map(|name| self.at_hand.get(name))
    }

    fn put(&self, source: Source, preparer: Preparer) {
        self.pulled.write().unwrap_or_else(PoisonError::into_inner).push((source, Arc::new(preparer)));
    }

    fn forget(&self, gone: &Source) {
        self.pulled.write().unwrap_or_else(PoisonError::into_inner).retain(|(source, _)| source != gone);
    }

    fn pulled(&self) -> RwLockReadGuard<'_, Vec<(Source, Arc<Preparer>)>> {
        self.pulled.read().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TINY: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/vectors/vllm/tiny-qwen3-vl");

    /// Is the model `served`, started as `engine_model`, pulled under a config that has `here` with a directory and `wanted` without?
    #[track_caller]
    fn check(models_from_workers: bool, served: &str, engine_model: &str, expect: bool) {
        let entry = |name: &str, dir: Option<&str>| ModelConfig {
            name: name.to_owned(),
            dir: dir.map(Into::into),
            declared: true,
        };
        let entries = vec![entry("here", Some(TINY)), entry("wanted", None)];
        let config = BalancerConfig { models: entries, models_from_workers, ..BalancerConfig::default() };
        let models = Models::load(&config).unwrap();
        let (base_names, engine_model) = (vec![served.to_owned()].into(), engine_model.to_owned());
        let source = Source { base_names, engine_model, engine_version: String::new() };
        assert_eq!(models.wants(&source), expect);
    }

    #[test]
    fn what_has_no_directory_is_pulled_as_far_as_the_config_asks_for_it() {
        for all in [false, true] {
            check(all, "here", "/model", false);
            check(all, "alias", "here", false);
            check(all, "wanted", "/model", true);
            check(all, "alias", "wanted", true);
            check(all, "other", "/model", all);
        }
    }
}
