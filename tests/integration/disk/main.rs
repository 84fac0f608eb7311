//! The cache on disk under the built server: warm after a crash, right when damaged, indifferent to
//! what is done to its directory, and within its limit all the time.

mod common;
mod damage;
mod limits;
mod memory;
mod outage;
mod restart;
mod shares;
