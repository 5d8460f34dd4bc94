-- The workers save before they stop (spec.checkpoint), and the quota is free.
if obj.spec.runPolicy == nil then
  obj.spec.runPolicy = {}
end
obj.spec.runPolicy.suspend = true
return obj
