-- One frame and the entries that should name it, at one moment; only reads.
-- KEYS: 1 {EXP:SHARD}:segments   2 {EXP:SHARD}:frame:KEY
-- ARGV: 1 frame key   2 an entry seen to name it, 0 for none   3 header digits
-- Returns: header digits ('' without frame), "1" if the entry in the header names the frame,
--          "1" if the entry of ARGV 2 is live and names it
local function names(entry)
  local live = redis.call('XRANGE', KEYS[1], entry .. '-0', entry .. '-0')[1]
  if live then
    for at = 1, #live[2], 2 do
      if live[2][at] == 'frames' then
        local frames = live[2][at + 1]
        for start = 1, #frames, 16 do
          if string.sub(frames, start, start + 15) == ARGV[1] then
            return '1'
          end
        end
      end
    end
  end
  return '0'
end
local header = redis.call('GETRANGE', KEYS[2], 0, tonumber(ARGV[3]) - 1)
local entry = string.match(header, '^%d+$') and string.format('%d', tonumber(header)) or '0'
return { header, names(entry), names(ARGV[2]) }
