//! The cluster as pure values: which member owns which chunk. Members and leaders are decided elsewhere. From
//! one view of them, every server computes the same answer.

pub mod placement;

pub use placement::{Member, Placement};
