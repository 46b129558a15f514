//! What sidecars saw their engines use for media items, as far as predictions ask for it.

use std::sync::Arc;

use fovea_gossip::message::LearntValue;
use fovea_kv::MediaKey;

use super::Rendering;

/// Facts about media items, of engines like the request's.
pub trait Learnt {
    /// What is known of an item; `None` also for [`LearntValue::Nothing`].
    fn get(&self, key: &MediaKey) -> Option<LearntMedia>;

    /// What an image of this size, in pixels as the engine measures it, becomes in the prompt. Asked of models without an image rule.
    fn rendering(&self, _width: u32, _height: u32) -> Option<Arc<Rendering>> {
        None
    }
}

/// One item as an engine was seen to take it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LearntMedia {
    /// Positions that it fills in the prompt: those that the engine keys by it. 0 = not seen.
    pub tokens: u32,
    pub value: LearntValue,
}

/// No fact at all.
#[derive(Clone, Copy, Debug, Default)]
pub struct NothingLearnt;

impl Learnt for NothingLearnt {
    fn get(&self, _: &MediaKey) -> Option<LearntMedia> {
        None
    }
}

impl<S: std::hash::BuildHasher> Learnt for std::collections::HashMap<MediaKey, LearntMedia, S> {
    fn get(&self, key: &MediaKey) -> Option<LearntMedia> {
        Self::get(self, key).filter(|learnt| learnt.value != LearntValue::Nothing).cloned()
    }
}
