-- Begin a shard's account, or leave it as it stands; returns the creation id that stands.
-- KEYS: 1 {EXP:SHARD}:state
-- ARGV: 1 creation id   2 byte limit, 0 for none   3 milliseconds after its lease that a reader
--       still holds others back
local standing = redis.call('HGET', KEYS[1], 'creation_id')
if standing then
  return standing
end
redis.call('HSET', KEYS[1], 'creation_id', ARGV[1], 'capacity_bytes', ARGV[2],
  'reader_timeout_ms', ARGV[3])
for _, counter in ipairs({ 'entry', 'segments', 'steps', 'episodes', 'bytes', 'frames_written',
  'frames_deduplicated', 'dropped_entries', 'dropped_segments', 'dropped_steps', 'dropped_frames',
  'dropped:retention', 'dropped:bytes', 'gaps' }) do
  redis.call('HSET', KEYS[1], counter, '0')
end
redis.call('HSET', KEYS[1], 'nonce', '', 'readers', '')
return ARGV[1]
