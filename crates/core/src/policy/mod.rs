//! Decisions that are not an order: who needs what most, what may enter the cache, what leaves
//! first, how far ahead to fetch, and what of an order that is known. Values in, values out.

pub mod admission;
pub mod ahead;
pub mod demand;
pub mod eviction;
pub mod pacing;
pub mod prefetch;
