//! The allocator against brute force, its promises as properties, and decisions under noise.

mod brute_force;
mod decisions;
mod examples;
mod random;
pub(crate) mod rng;
