//! A hit window: memory of a hit connection, which its server writes and its client reads. Here it is called
//! a window for short.
//!
//! A server puts bytes there instead of sending them through a socket. That saves two copies, and buffers of
//! the kernel. The client makes the memory ([`View::new`]) and sends its descriptor; the server accepts it
//! ([`Window::accept`]). The client also decides where bytes go ([`View::take`]), so the server keeps no
//! record of what the client still holds.
//!
//! ```text
//!   FREE ──take──▶ TAKEN ──the server answered──▶ FILLED (Bytes) ──dropped──▶ FREE
//!                    └──── dropped, if the connection still works ───────────────▲
//! ```
//!
//! Invariants
//! 1. All pages of a window are there before its server accepts it, and nobody can take one away after that:
//!    the server seals the memory first, and then looks. So a write never ends the server with a signal, and
//!    never takes memory: Linux counts the pages for the client, who wrote them first.
//! 2. The server only writes, and reads nothing from a window. What a client does to its own memory can harm
//!    nobody else.
//! 3. The server writes a place only to answer a request of the same connection that names this place.
//! 4. A place is taken by one holder at a time. After a request that failed, the server may still write its
//!    place, so the client drops the connection and takes no further place of its window. Places that are
//!    filled stay valid for as long as they are held, whatever becomes of the server.
//! 5. What a program writes into bytes of a window, in place, only that process sees: no child, no other
//!    holder, and not the next holder of the same place.
//! 6. The memory is freed when neither side has it mapped. A killed process frees its side.

mod places;
mod server;
mod view;
mod written_pages;

pub use server::{BadWindow, Window};
pub use view::{Filled, Place, View};
