//! The invariants of packs, as properties. `golden` has the golden files, `keep` the packs with a parent.

mod golden;
mod group;
mod keep;

use super::{ChunkPlan, GroupKey, Item, Packer};
use crate::manifest::LayoutParams;

/// A small random generator with a fixed sequence, so that figures are the same on every machine.
struct Rng(u64);

impl Rng {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    fn below(&mut self, n: u64) -> u64 {
        self.next() % n
    }

    /// Returns a length whose logarithm is about normal (a sum of twelve), as for files of photos.
    fn length(&mut self, median: f64, sigma: f64) -> u32 {
        let sum: f64 = (0..12).map(|_| self.below(1 << 20) as f64 / f64::from(1 << 20)).sum();
        ((median * ((sum - 6.0) * sigma).exp()) as u32).clamp(1, 4 << 20)
    }
}

fn pack_all(params: &LayoutParams, mut items: Vec<Item>) -> Vec<ChunkPlan> {
    items.sort_unstable();
    let mut packer = Packer::new(params);
    let mut out = Vec::new();
    for i in items {
        out.extend(packer.push(i).expect("in order"));
    }
    out.extend(packer.finish());
    out
}

fn key(of: u64) -> GroupKey {
    GroupKey::of(&format!("{of:08}"))
}
