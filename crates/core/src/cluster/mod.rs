//! The cluster as pure values: who owns what. Members and leaders are decided elsewhere; here a view of
//! them becomes an answer that everyone who has the same view gives alike.

pub mod placement;

pub use placement::{Member, Placement};
