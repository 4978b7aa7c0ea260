-- Drop entries that retention lets go, oldest first, a bounded number; returns how many.
-- Runs on a server that is out of memory: it deletes first and counts after.
-- KEYS: 1 {EXP:SHARD}:state   2 {EXP:SHARD}:segments
--       and, of the same slot, {EXP:SHARD}:frame:* (prefix in ARGV 2)
-- ARGV: 1 creation id   2 frame prefix   3 bytes that the next entry needs   4 entries at most
--       5 bytes to free beyond the byte limit (a server out of memory has a limit of its own)
--#include retention.lua
local state = as_table(redis.call('HGETALL', KEYS[1]))
if state['creation_id'] ~= ARGV[1] then
  return { 'unknown experiment' }
end
local need_bytes = tonumber(ARGV[3])
if tonumber(ARGV[5]) > 0 then
  -- Out of memory: what is there now is the limit, and `ARGV 5` bytes of it must go.
  state['capacity_bytes'] = text(math.max(1, number(state, 'bytes') - tonumber(ARGV[5])))
  need_bytes = 0
end
local plan = plan_drops(
  state, KEYS[2], ARGV[2], readers_of(state), number(state, 'steps'), need_bytes, {}, tonumber(ARGV[4])
)
if #plan.entries > 0 then
  local changed = { 'bytes', text(number(state, 'bytes') - plan.freed) }
  carry_out(plan, state, KEYS[2], changed)
  redis.call('HSET', KEYS[1], unpack(changed))
end
return { 'dropped', text(#plan.entries) }
