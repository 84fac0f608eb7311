//! The cluster as pure values: who owns which chunk, who is up, and who was silent for too long.
//!
//! Coordination happens elsewhere. From one view, every server computes the same answer.

pub mod placement;
pub mod ring;
pub mod silence;
pub mod view;

pub use placement::{Member, Placement};
pub use ring::{MEMBERS_MAX, Ring, RingMember, Weight};
pub use silence::Silence;
pub use view::View;
