//! Images whose encoder output one engine keeps, the least recently used leaving first.

use std::collections::{BTreeMap, HashMap};

#[derive(Debug)]
pub struct EncoderCache {
    /// Image tokens kept at the most.
    capacity: u64,
    held: u64,
    clock: u64,
    /// (last use, tokens) by image.
    images: HashMap<u64, (u64, u32)>,
    by_use: BTreeMap<u64, u64>,
}

impl EncoderCache {
    pub fn new(capacity: u64) -> Self {
        Self { capacity, held: 0, clock: 0, images: HashMap::new(), by_use: BTreeMap::new() }
    }

    pub fn holds(&self, image: u64) -> bool {
        self.images.contains_key(&image)
    }

    /// Uses an image; true when it has to be encoded.
    pub fn touch(&mut self, image: u64, tokens: u32) -> bool {
        self.clock += 1;
        let before = self.images.insert(image, (self.clock, tokens));
        self.by_use.insert(self.clock, image);
        match before {
            Some((used, _)) => {
                self.by_use.remove(&used);
            }
            None => self.held += u64::from(tokens),
        }
        while self.held > self.capacity {
            let Some((_, oldest)) = self.by_use.pop_first() else { break };
            let (_, tokens) = self.images.remove(&oldest).unwrap_or_default();
            self.held -= u64::from(tokens);
        }
        before.is_none()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_least_recently_used_image_leaves_first() {
        let mut cache = EncoderCache::new(100);
        assert_eq!([1, 2, 1, 3].map(|image| cache.touch(image, 40)), [true, true, false, true]);
        assert_eq!([1, 2, 3].map(|image| cache.holds(image)), [true, false, true]);
    }
}
