//! A hit window: memory of a hit connection, which its server writes and its client reads. Here it is called
//! a window for short.
//!
//! A server puts bytes there instead of sending them through a socket. That saves two copies, and buffers of
//! the kernel. The server makes the memory ([`Offer::new`]) and sends a descriptor that can only read. The
//! client touches every page ([`View::accept`]), so that the pages count for the client. Then the server
//! looks whether they are there ([`Offer::accept`]). The client also decides where bytes go ([`View::take`]),
//! so the server keeps no record of what the client still holds.
//!
//! ```text
//!   FREE ──take──▶ TAKEN ──the server answered──▶ FILLED (Bytes) ──dropped──▶ FREE
//!                    └──── dropped, if the connection still works ───────────────▲
//! ```
//!
//! Invariants
//! 1. The server takes no descriptor of a client. Each call on a foreign descriptor, its close above all, can
//!    wait for a process that the client chose: a file of FUSE asks its daemon.
//! 2. All pages of a window are there before the server writes to it, and no client can take one away: the
//!    memory is sealed before the client gets it. So a write never ends the server with a signal, and never
//!    takes memory: Linux counts the pages for the client, who touched them first. The client's descriptor
//!    cannot write, so the client holds no lock of the memory while the server looks at it.
//! 3. The server only writes, and reads nothing from a window. What a client does to its own memory can harm
//!    nobody else.
//! 4. The server writes a place only to answer a request of the same connection that names this place.
//! 5. A place is taken by one holder at a time. After a request that failed, the server may still write its
//!    place, so the client drops the connection and takes no further place of its window. Places that are
//!    filled stay valid for as long as they are held, whatever becomes of the server.
//! 6. What a program writes into bytes of a window, in place, only that process sees: no child, no other
//!    holder, and not the next holder of the same place.
//! 7. The memory is freed when neither side has it mapped. A killed process frees its side.

mod places;
mod server;
mod view;
mod written_pages;

pub use server::{Offer, Window};
pub use view::{BadWindow, Filled, Place, View};
