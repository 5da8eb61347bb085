//! Finds the first byte of a kind, many bytes at a time.
//!
//! A block is asked as a whole whether it holds one, which compilers turn into a few vector
//! instructions; only the block that does is gone through byte by byte.
//!
//! Does not know what is looked for.

const BLOCK: usize = 16;

/// Where the first byte is for which `is` holds.
#[inline]
pub(super) fn position(bytes: &[u8], is: impl Fn(u8) -> bool) -> Option<usize> {
    let holds_one = |block: &[u8]| block.iter().fold(false, |found, byte| found | is(*byte));
    let mut skipped = 0;
    for block in bytes.chunks_exact(BLOCK) {
        if holds_one(block) {
            break;
        }
        skipped += BLOCK;
    }
    let rest = &bytes[skipped..];
    let found = rest.iter().position(|byte| is(*byte));
    found.map(|index| skipped + index)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_is_found_wherever_it_stands() {
        for length in 0..50 {
            let mut bytes = vec![b'a'; length];
            assert_eq!(position(&bytes, |byte| byte == b'b'), None);
            for index in (0..length).rev() {
                bytes[index] = b'b';
                assert_eq!(position(&bytes, |byte| byte == b'b'), Some(index));
            }
        }
    }
}
