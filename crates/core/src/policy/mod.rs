//! Decisions that are not an order: who needs what most, what may enter the cache, what leaves
//! first, and how far ahead to fetch. Pure functions of numbers that the server counts.

pub mod admission;
pub mod demand;
pub mod eviction;
pub mod pacing;
