//! Seeded random numbers (SplitMix64), and one-way mixing for made-up tokens.

/// Scrambles a number; different inputs give unrelated outputs.
pub fn mix(value: u64) -> u64 {
    let mut z = value.wrapping_add(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// A stream of numbers that depends on its seed alone.
#[derive(Clone, Debug)]
pub struct Random(u64);

impl Random {
    pub fn new(seed: u64) -> Self {
        Self(mix(seed))
    }

    pub fn number(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        mix(self.0)
    }

    /// Evenly below `count`; 0 when `count` is 0.
    pub fn below(&mut self, count: usize) -> usize {
        let count = count as u64;
        usize::try_from(self.number().checked_rem(count).unwrap_or(0)).unwrap_or(0)
    }

    /// Evenly in [0, 1).
    pub fn unit(&mut self) -> f64 {
        (self.number() >> 11) as f64 / (1_u64 << 53) as f64
    }

    /// Time between two events of a Poisson process with one event per unit of time.
    pub fn gap(&mut self) -> f64 {
        -(1.0 - self.unit()).ln()
    }

    /// About normal (sum of 12 even numbers), at least 1, rounded.
    pub fn around(&mut self, mean: f64, deviation: f64) -> u32 {
        let sum: f64 = (0..12).map(|_| self.unit()).sum();
        (mean + (sum - 6.0) * deviation).round().max(1.0) as u32
    }

    pub fn shuffle<T>(&mut self, items: &mut [T]) {
        for end in (1..items.len()).rev() {
            items.swap(end, self.below(end + 1));
        }
    }
}
