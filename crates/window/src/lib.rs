//! A hit window: memory of a hit connection, which its server writes and its client reads. Here it is called
//! a window for short.
//!
//! A server puts bytes there instead of sending them through a socket. That saves two copies, and buffers of
//! the kernel. The client decides where bytes go ([`View::take`]), so the server keeps no record of what the
//! client still holds.
//!
//! ```text
//!   FREE ──take──▶ TAKEN ──the server answered──▶ FILLED (Bytes) ──dropped──▶ FREE
//!                    └──── dropped, if the connection still works ───────────────▲
//! ```
//!
//! Invariants
//! 1. The server alone can write. The memory is sealed before a client gets it: nobody can map it writable
//!    again, write to it by a call, or change its length. So a client never meets a page that is not there.
//! 2. The server writes a place only to answer a request of the same connection that names this place.
//! 3. A place is taken by one holder at a time. After a request that failed, the server may still write its
//!    place, so the client drops the connection and takes no further place of its window. Places that are
//!    filled stay valid for as long as they are held, whatever becomes of the server.
//! 4. The memory is freed when neither side has it mapped. A killed process frees its side.

mod places;
mod server;
mod view;

pub use server::Window;
pub use view::{BadWindow, Filled, Place, View};
