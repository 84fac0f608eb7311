//! The disk tier of the built server: warm after a crash, correct after damage, and always within its limit.
//!
//! Harm to its directory costs only speed.

mod common;
mod damage;
mod limits;
mod memory;
mod outage;
mod pool;
mod restart;
mod shares;
mod uses;
